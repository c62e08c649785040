"""``python -m fuseboard``: the command ``fuseboard``, for the Python at hand."""

from fuseboard.cli.main import app

app(prog_name="fuseboard")
