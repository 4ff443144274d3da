"""The processes of one work, as a launcher starts them: they share out, average and agree on what they do."""

from linattn.processes.group import Processes as Processes
from linattn.processes.group import interrupts as interrupts
from linattn.processes.group import launched as launched
