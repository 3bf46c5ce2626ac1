"""The one error class a user meets for input that can be fixed by the user."""


class ConfigError(ValueError):
    """Bad input: names the field, the value and the fix.

    Raised before any device or download is touched wherever that is possible. The launcher and
    the training program print its text alone and exit with code 2.
    """

    def __init__(self, field: str, value: object, problem: str, fix: str):
        self.field, self.value, self.problem, self.fix = field, value, problem, fix
        super().__init__(f"{field} = {value!r}: {problem}\n  fix: {fix}")
