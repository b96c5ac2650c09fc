"""The stubs say what the native part is: types, names and documentation."""

import ast
import inspect
import pathlib
import subprocess
import sys
import tempfile
import unittest

import vnplug

PACKAGE = pathlib.Path(vnplug.__file__).parent


class Typing(unittest.TestCase):
    def mypy(self, *args: str) -> None:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", *args]
            done = subprocess.run(command, capture_output=True, text=True, cwd=cache)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_package_and_its_tests_are_strictly_typed(self) -> None:
        tests = pathlib.Path(__file__).parent
        examples = tests.parent / "examples"
        self.mypy("mypy", "--strict", "--package", "vnplug")
        config = str(tests.parent / "pyproject.toml")
        self.mypy("mypy", "--strict", "--config-file", config, str(tests), str(examples))

    def test_the_stubs_agree_with_the_native_part(self) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as allowed:
            # Python gives it a name since 3.12.
            allowed.write("vnplug._native.Packet.__buffer__\n")
            allowed.flush()
            lists = ["--allowlist", allowed.name, "--ignore-unused-allowlist"]
            self.mypy("mypy.stubtest", "vnplug", "--ignore-disjoint-bases", *lists)

    def test_every_docstring_is_that_of_the_stubs(self) -> None:
        stubs = ast.parse((PACKAGE / "_native.pyi").read_text())
        seen = 0
        for top in stubs.body:
            if not isinstance(top, (ast.ClassDef, ast.FunctionDef)):
                continue
            inner = top.body if isinstance(top, ast.ClassDef) else []
            parts = [(top, "")] + [
                (part, part.name) for part in inner if isinstance(part, ast.FunctionDef)
            ]
            for part, name in parts:
                wanted = ast.get_docstring(part)
                if wanted is None:
                    continue
                owner = getattr(vnplug, top.name)
                thing = getattr(owner, name) if name else owner
                self.assertEqual(inspect.getdoc(thing), wanted, f"{top.name}.{name}")
                seen += 1
        self.assertGreater(seen, 50)


if __name__ == "__main__":
    unittest.main()
