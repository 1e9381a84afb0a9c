"""Settings shared by all tests."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()
