"""Training drafters and their length heads."""

from .opd_config import OPDConfig
from .opd_trainer import OPDTrainer

__all__ = ["OPDConfig", "OPDTrainer"]
