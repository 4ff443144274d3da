"""Which method for which head: written forms, costs, measures of error, and the plan that chooses."""

from linattn.planning.choosing import CANDIDATES as CANDIDATES
from linattn.planning.choosing import plan as plan
from linattn.planning.plans import HeadPlan as HeadPlan
from linattn.planning.plans import Plan as Plan
from linattn.planning.plans import read_plans as read_plans
from linattn.planning.plans import write_plans as write_plans
