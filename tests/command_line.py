"""The command line in this process: what a command prints, and how it ends."""

from axonn_tune.cli.main import main


def run_cli(capsys, *arguments):
    """Return the exit code, standard output and standard error of one command."""
    capsys.readouterr()
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def assert_refused(capsys, *arguments, culprit):
    """Assert that a command ends with code 2 and one line that names the culprit."""
    code, out, err = run_cli(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("axonn-tune: ") and err.count("\n") == 1
    assert culprit in err
    assert "Traceback" not in err
