"""The report: it reads the files of audit, reproduce and bench and nothing else, and measures nothing."""

from linattn_lab.report._text import Point as Point
from linattn_lab.report.audit.summary import AuditSummary as AuditSummary
from linattn_lab.report.bench.summary import BenchSummary as BenchSummary
from linattn_lab.report.claims.summary import ClaimsSummary as ClaimsSummary
from linattn_lab.report.memory.summary import MemorySummary as MemorySummary
from linattn_lab.report.page import FIGURES as FIGURES
from linattn_lab.report.page import TWIN as TWIN
from linattn_lab.report.page import Report as Report
from linattn_lab.report.page import write_page as write_page
from linattn_lab.report.page import write_report as write_report
from linattn_lab.report.twin import Twin as Twin
from linattn_lab.report.twin import report_schema as report_schema
