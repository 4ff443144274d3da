"""The report of an audit: reads audit.jsonl and nothing else, and is never called while measuring."""

from linattn.lab.report._tables import Table as Table
from linattn.lab.report._tables import overview as overview
from linattn.lab.report.advice import Advice as Advice
from linattn.lab.report.advice import Point as Point
from linattn.lab.report.advice import advise as advise
from linattn.lab.report.page import write_page as write_page
from linattn.lab.report.summary import Summary as Summary
from linattn.lab.report.summary import summarise as summarise
