"""The processes of one work, as a launcher starts them: what they share out, and that none waits for a stopped one."""

from linattn.processes.group import Processes as Processes
from linattn.processes.launching import launched as launched
