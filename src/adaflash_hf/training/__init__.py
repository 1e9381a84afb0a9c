"""Training drafters and their length heads."""

from .callbacks import AcceptancePlotCallback, plot_acceptance
from .opd_config import OPDConfig
from .opd_trainer import OPDTrainer

__all__ = ["AcceptancePlotCallback", "OPDConfig", "OPDTrainer", "plot_acceptance"]
