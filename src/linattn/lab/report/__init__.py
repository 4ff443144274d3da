"""The reports of an audit and of a benchmark: they read its file and nothing else, and measure nothing."""

from linattn.lab.report._tables import overview as overview
from linattn.lab.report._text import Table as Table
from linattn.lab.report.advice import Advice as Advice
from linattn.lab.report.advice import Point as Point
from linattn.lab.report.advice import advise as advise
from linattn.lab.report.bench_page import write_bench_page as write_bench_page
from linattn.lab.report.bench_summary import BenchSummary as BenchSummary
from linattn.lab.report.bench_summary import conclude as conclude
from linattn.lab.report.bench_summary import length_table as length_table
from linattn.lab.report.bench_summary import summarise_bench as summarise_bench
from linattn.lab.report.page import write_page as write_page
from linattn.lab.report.summary import Summary as Summary
from linattn.lab.report.summary import summarise as summarise
