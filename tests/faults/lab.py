"""Faults of planning, measuring and reporting."""

from __future__ import annotations

from faults.fault import Fault

BLOCKED = "attention/backends/blocked/"
RECALL = "lab/experiments/recall/"

FAULTS = (
    Fault(
        "shift the causal diagonal up", BLOCKED + "causal.py", ".tril_()", ".tril_(1)", "tests/laws/test_causality.py"
    ),
    Fault(
        "shift the causal diagonal down", BLOCKED + "causal.py", ".tril_()", ".tril_(-1)", "tests/laws/test_truth.py"
    ),
    Fault(
        "take figures again that were kept",
        "lab/experiments/reproduction.py",
        "if (measurement.series, measurement.x) not in taken:",
        "if measurement:",
        "tests/lab/experiments/test_reproduction.py",
    ),
    Fault(
        "let a crash end the run",
        "lab/experiments/reproduction.py",
        # Text to look for: there one broken experiment must not cost the others their figures.
        "        except Exception:",
        "        except KeyError:",
        "tests/lab/experiments/test_reproduction.py",
    ),
    Fault(
        "lose what another setting measured",
        "lab/asides.py",
        "shutil.copy2(file, aside)",
        "aside.touch()",
        "tests/lab/commands/test_reproduce.py",
    ),
    Fault(
        "overwrite another audit's figures",
        "lab/commands/_audit_files.py",
        "if files.records.exists() and (again or not _is_of(measured, files.records)):",
        "if files.records.exists() and again:",
        "tests/lab/commands/test_audit.py",
    ),
    Fault(
        "measure finished methods of an audit again",
        "lab/audit/measuring.py",
        "is_done=is_whole or kept.has_heads(label, features, draw, number),",
        "is_done=False,",
        "tests/lab/commands/test_audit.py",
    ),
    Fault(
        "keep the rows of a layer that was cut short",
        "lab/audit/kept.py",
        "number == wanted[group[0]][group[-1]]",
        "number > 0",
        "tests/lab/commands/test_audit.py",
    ),
    Fault(
        "take an earlier run's work for this one's",
        "lab/pace.py",
        "now = self.done - self._kept",
        "now = self.done",
        "tests/lab/test_pace.py",
    ),
    Fault(
        "say nothing within a long stage",
        "lab/commands/stages.py",
        "if self._clock() - self._last >= _SILENCE:",
        "if self._clock() < 0:",
        "tests/lab/test_pace.py",
    ),
    Fault(
        "trust plans of another audit",
        "lab/audit/planned.py",
        "_choices(pair[1]) == measured.get(pair[0])",
        "bool(pair)",
        "tests/lab/audit/test_planned.py",
    ),
    Fault(
        "call what could not be decided a success",
        "lab/commands/reproduce.py",
        "if undecided or run.crashes:",
        "if run.crashes:",
        "tests/lab/commands/test_reproduce.py",
    ),
    Fault(
        "leave a last line that was cut off",
        "records/jsonl.py",
        'content[: content.rfind(b"\\n") + 1]',
        "content",
        "tests/lab/commands/test_reproduce.py",
    ),
    Fault(
        "end lines where a text has a line separator",
        "records/jsonl.py",
        '.split("\\n")',
        ".splitlines()",
        "tests/records/test_jsonl.py",
    ),
    Fault(
        "let a file whose figures contradict each other end the report",
        "lab/report/page.py",
        # Text to look for: there what is wrong with a file is put on the page.
        "    except Exception as error:",
        "    except KeyboardInterrupt as error:",
        "tests/lab/report/test_damage.py",
    ),
    Fault(
        "take truths for whole numbers",
        "records/fields.py",
        "if isinstance(value, bool) or wanted is bool:",
        "if wanted is bool:",
        "tests/records/test_fields.py",
    ),
    Fault(
        "draw bars of one standard error",
        "lab/report/claims/figures.py",
        "_BAR = 2",
        "_BAR = 1",
        "tests/lab/report/test_claims.py",
    ),
    Fault(
        "leave charts in folds undrawn",
        "lab/report/templates/page.js",
        "if (details.open) draw(id);",
        "",
        "tests/lab/report/browser",
    ),
    Fault(
        "sort numbers as text",
        "lab/report/templates/page.js",
        ": x - y;",
        ": a.localeCompare(b);",
        "tests/lab/report/browser",
    ),
    Fault(
        "keep the charts' colours when the theme changes",
        "lab/report/templates/page.js",
        """  redraw();
}""",
        "}",
        "tests/lab/report/browser",
    ),
    Fault(
        "leave nothing out of an audit",
        "lab/audit/leaving_out.py",
        "_LENGTH = 8192",
        "_LENGTH = 2**40",
        "tests/lab/commands/test_audit.py",
    ),
    Fault(
        "import every subcommand for help",
        "lab/commands/app.py",
        "    def format_commands(",
        "    def format_every_command(",
        "tests/lab/commands/test_app.py",
    ),
    Fault(
        "call an unfinished audit whole",
        "lab/report/audit/summary.py",
        "if found[label] < count]",
        "if found[label] < 0]",
        "tests/lab/commands/test_audit.py",
    ),
    Fault(
        "ask for the first value of a key",
        RECALL + "_task.py",
        "values = values.scatter(1, updated, later)",
        "values = values.clone()",
        "tests/lab/experiments/test_recall_task.py",
    ),
    Fault(
        "put queries far from the context",
        RECALL + "_task.py",
        "** (task.power - 1)",
        "** (1 - task.power)",
        "tests/lab/experiments/test_recall_task.py",
    ),
    Fault(
        "draw slots of queries one by one with the same weights",
        RECALL + "_task.py",
        "return (clocks / weights).argsort(1)[:, :size]",
        "return (clocks.log() / weights).argsort(1)[:, :size]",
        "tests/lab/experiments/test_recall_task.py",
    ),
    Fault(
        "take the first value for a key",
        RECALL + "_task.py",
        "torch.ones(half - 1)",
        "torch.ones(half)",
        "tests/lab/experiments/test_recall_task.py",
    ),
    Fault(
        "leave what convolutions keep out of a state's bytes",
        RECALL + "_networks.py",
        "pytree.tree_leaves(state)",
        "pytree.tree_leaves([layer.stream for layer in state])",
        "tests/lab/experiments/test_recall.py",
    ),
    Fault(
        "forget the convolutions' tokens between parts of a stream",
        RECALL + "_networks.py",
        "self._convolved(normed, before)",
        "self._convolved(normed, None)",
        "tests/lab/experiments/test_recall.py",
    ),
    Fault(
        "call beyond reach what two layers bring",
        RECALL + "a_window_does_not_help_recall.py",
        "shown.shown < below",
        "shown.shown < first",
        "tests/lab/experiments/test_recall.py",
    ),
    Fault(
        "look for the length from which a method pays until it is slower",
        "lab/audit/paying.py",
        "if ours < theirs or",
        "if ours > theirs or",
        "tests/lab/audit/test_paying.py",
    ),
    Fault(
        "time a method that another beats in error and in time",
        "lab/audit/paying.py",
        "min((1 - _SMALL_GAIN) * uniform, least)",
        "(1 - _SMALL_GAIN) * uniform",
        "tests/lab/audit/test_paying.py",
    ),
    Fault(
        "say of a model that is slower that it pays",
        "lab/report/audit/paying.py",
        "elif chosen.time_ratio < 1:",
        "elif chosen.time_ratio < 3:",
        "tests/lab/report/test_paying.py",
    ),
    Fault(
        "call a state smaller than an exact cache as large as it",
        "lab/report/audit/paying.py",
        "elif chosen.state_numbers < exact_numbers(summary):",
        "elif chosen.state_numbers <= exact_numbers(summary):",
        "tests/lab/report/test_paying.py",
    ),
    Fault(
        "draw what is not finite",
        "lab/report/charts.py",
        "if value is None or not math.isfinite(value) or",
        "if value is None or",
        "tests/lab/report/test_claims.py",
    ),
)
