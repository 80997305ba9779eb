"""Training functions as people publish them, written anew at tiny sizes."""

from tests.behaviour.training_functions import detection, language, reinforcement, speech_and_graphs, vision
from tests.behaviour.training_functions.base import TRAININGS

__all__ = ["TRAININGS", "detection", "language", "reinforcement", "speech_and_graphs", "vision"]
