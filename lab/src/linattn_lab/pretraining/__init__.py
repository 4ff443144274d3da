"""A language model of bytes from nothing: a corpus split by file, its training, and how many bits a byte costs."""

from linattn_lab.pretraining.config import TrainConfig as TrainConfig
from linattn_lab.pretraining.corpus import Corpus as Corpus
from linattn_lab.pretraining.corpus import from_documents as from_documents
from linattn_lab.pretraining.corpus import python_documents as python_documents
from linattn_lab.pretraining.corpus import read_documents as read_documents
from linattn_lab.pretraining.pretraining import Pretraining as Pretraining
from linattn_lab.pretraining.pretraining import pretrain as pretrain
from linattn_lab.pretraining.scoring import Score as Score
