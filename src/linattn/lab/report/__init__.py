"""The report: it reads the files of audit, reproduce and bench and nothing else, and measures nothing."""

from linattn.lab.report._text import Point as Point
from linattn.lab.report.audit.advice import Advice as Advice
from linattn.lab.report.audit.advice import advise as advise
from linattn.lab.report.audit.summary import AuditSummary as AuditSummary
from linattn.lab.report.audit.summary import summarise_audit as summarise_audit
from linattn.lab.report.audit.tables import overview as overview
from linattn.lab.report.bench.summary import BenchSummary as BenchSummary
from linattn.lab.report.bench.summary import conclude as conclude
from linattn.lab.report.bench.summary import length_table as length_table
from linattn.lab.report.bench.summary import summarise_bench as summarise_bench
from linattn.lab.report.claims.summary import SOURCES as SOURCES
from linattn.lab.report.claims.summary import ClaimsSummary as ClaimsSummary
from linattn.lab.report.claims.summary import summarise_claims as summarise_claims
from linattn.lab.report.claims.summary import verdict_table as verdict_table
from linattn.lab.report.memory.summary import MemorySummary as MemorySummary
from linattn.lab.report.memory.summary import summarise_memory as summarise_memory
from linattn.lab.report.memory.words import conclusions as conclusions
from linattn.lab.report.memory.words import lost as lost
from linattn.lab.report.memory.words import table_at as table_at
from linattn.lab.report.page import FIGURES as FIGURES
from linattn.lab.report.page import TWIN as TWIN
from linattn.lab.report.page import Report as Report
from linattn.lab.report.page import write_page as write_page
from linattn.lab.report.page import write_report as write_report
from linattn.lab.report.twin import Twin as Twin
from linattn.lab.report.twin import report_schema as report_schema
