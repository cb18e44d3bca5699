"""Names of the files that lie beside the two models, and who writes them."""

CARD = "README.md"  # training.card
RECORD = "training.json"  # training.ship, from the records of both runs
REFERENCE = "reference.json"  # training.reference
EVALUATION = "evaluation.json"  # training.evaluate
LICENCE = "LICENSE.python.txt"  # training.ship, from the Python that trained
