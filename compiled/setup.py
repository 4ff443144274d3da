"""The extension module, for every Python from 3.11 on; the rest is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "linattn_compiled._steps",
            ["src/linattn_compiled/_steps.c"],
            py_limited_api=True,
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
