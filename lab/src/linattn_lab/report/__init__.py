"""The report: it reads the files of audit, reproduce and bench and nothing else, and measures nothing."""

from linattn_lab.report._text import Point as Point
from linattn_lab.report.audit.advice import Advice as Advice
from linattn_lab.report.audit.advice import advise as advise
from linattn_lab.report.audit.summary import AuditSummary as AuditSummary
from linattn_lab.report.audit.summary import summarise_audit as summarise_audit
from linattn_lab.report.audit.tables import overview as overview
from linattn_lab.report.bench.summary import BenchSummary as BenchSummary
from linattn_lab.report.bench.summary import conclude as conclude
from linattn_lab.report.bench.summary import length_table as length_table
from linattn_lab.report.bench.summary import summarise_bench as summarise_bench
from linattn_lab.report.claims.summary import SOURCES as SOURCES
from linattn_lab.report.claims.summary import ClaimsSummary as ClaimsSummary
from linattn_lab.report.claims.summary import summarise_claims as summarise_claims
from linattn_lab.report.claims.summary import verdict_table as verdict_table
from linattn_lab.report.memory.summary import MemorySummary as MemorySummary
from linattn_lab.report.memory.summary import summarise_memory as summarise_memory
from linattn_lab.report.memory.words import glance as glance
from linattn_lab.report.memory.words import lost as lost
from linattn_lab.report.memory.words import table_at as table_at
from linattn_lab.report.page import FIGURES as FIGURES
from linattn_lab.report.page import TWIN as TWIN
from linattn_lab.report.page import Report as Report
from linattn_lab.report.page import write_page as write_page
from linattn_lab.report.page import write_report as write_report
from linattn_lab.report.twin import Twin as Twin
from linattn_lab.report.twin import report_schema as report_schema
