"""A language model of bytes from nothing: a corpus split by file, its training, and how many bits a byte costs."""

from linattn.pretraining.config import TrainConfig as TrainConfig
from linattn.pretraining.corpus import Corpus as Corpus
from linattn.pretraining.corpus import from_documents as from_documents
from linattn.pretraining.corpus import python_documents as python_documents
from linattn.pretraining.corpus import read_documents as read_documents
from linattn.pretraining.pretraining import Pretraining as Pretraining
from linattn.pretraining.pretraining import pretrain as pretrain
from linattn.pretraining.scoring import Score as Score
