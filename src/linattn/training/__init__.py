"""A training loop that is cut off and goes on; conversions and new language models share it."""

from importlib.util import find_spec

if find_spec("tensorboard") is None:
    raise ImportError("linattn trains with tensorboard, not installed here: pip install 'linattn[train]'")

from linattn.feature_maps.digests import weights_digest as weights_digest
from linattn.processes import Processes as Processes
from linattn.processes import launched as launched
from linattn.training.budgets import Budget as Budget
from linattn.training.budgets import Progress as Progress
from linattn.training.budgets import Seconds as Seconds
from linattn.training.budgets import Steps as Steps
from linattn.training.checkpoints import WorkFolder as WorkFolder
from linattn.training.checkpoints import alone_in as alone_in
from linattn.training.loop import Notify as Notify
from linattn.training.loop import Trained as Trained
from linattn.training.loop import Training as Training
from linattn.training.loop import train as train
