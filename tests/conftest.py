"""Settings shared by all tests."""

import os
import sys
from pathlib import Path

# Helpers of the decoding tests serve those of training too.
sys.path.append(str(Path(__file__).parent / "generation"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()
