"""The extension modules, for every Python from 3.11 on; the rest is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"linattn_compiled.{name}",
            [f"src/linattn_compiled/{name}.c"],
            depends=[f"src/linattn_compiled/{header}.h" for header in ("_lanes", "_merging", "_coded_rows")],
            py_limited_api=True,
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
        )
        for name in ("_steps", "_merging", "_everywhere", "_codes", "_coding")
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
