from .eagle import Eagle3Drafter

DRAFTER = Eagle3Drafter
