"""What users and models said, where a log repeats it: a prompt with the words of a failure is none.

vLLM prints requests with ``--enable-log-requests`` (vllm 0.33.0,
vllm/entrypoints/serve/utils/request_logger.py:57-124) and answers with
``VLLM_DEBUG_LOG_API_SERVER_RESPONSE`` (vllm/entrypoints/serve/middleware/log_response.py:122-156),
mostly at INFO and DEBUG, a body at the level of ``VLLM_REQUEST_BODY_LOG_LEVEL``. It sets its prefix
before every line of a message (vllm/logging_utils/formatter.py:75-78). Programs around it print the
text as it is, over several lines.
"""

from __future__ import annotations

import re

from sm75.explain import lines

# Levels at which nothing has failed.
_QUIET = frozenset({"TRACE", "DEBUG", "INFO"})
# vLLM's own request lines, at any level.
_REQUEST = re.compile(
    r"Received request \S{1,200}: |Request \S{1,200} (?:details: prompt|JSON body): |"
    r"Generated response \S{1,200}[ :]|response_body=\{"
)
# A record of python-json-logger (vllm/logger.py:241-248).
_RECORD = re.compile(r'\s{0,8}\{(?:[^{}\\]|\\.){0,400}?"level(?:name)?": ?"([A-Za-z]{4,8})"')
# The level in the line of another logger: `INFO:     …`, `… - app - INFO - …`, `… | INFO | …`.
_LEVEL = re.compile(
    r"(?:^|[\s|\[:-])(TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)(?=[\s|\]:]|$)"
)
# Where another logger's level stands, in characters from the start.
_LEVEL_WITHIN = 120
# Words with which other loggers begin what a user said.
_CARRIES = re.compile(
    r"\b(?:prompts?|messages?|content|request|response|query|question|completion|inputs?)\b",
    re.IGNORECASE,
)
_OPENING = re.compile(r"""\b(?:prompts?|content|query|question|output|text)["']? ?[:=] ?(["'])""")
# What stands behind a quotation's end: the next field, a bracket, or nothing.
_AFTER = r"(?:\s{0,8}$|\s?[,)}\]])"
# Cheap tests, before the patterns above.
_WORDS = ("prompt", "content", "query", "question", "output", "text")
# A quotation that never ends must not hide the rest of the log.
_MOST_LINES = 1000


class Speech:
    """Follows a log and knows where it repeats what was said."""

    def __init__(self) -> None:
        self._end: re.Pattern[str] | None = None
        self._left = 0

    @property
    def open(self) -> bool:
        """Whether a quotation began that has not ended."""
        return self._end is not None

    @staticmethod
    def may_begin(text: str) -> bool:
        """Whether a quotation can begin in a text of several lines at all: a cheap test."""
        return any(word in text for word in _WORDS)

    def within(self, text: str) -> bool:
        """Take the next line; say whether it lies in a quotation that an earlier line began.

        Args:
            text: The line.
        """
        if self._end is not None:
            self._left -= 1
            if self._left > 0 and not lines.led(text):
                if self._end.search(text):
                    self._end = None
                return True
            self._end = None
        if self.may_begin(text) and said(text):
            self._begin(text)
        return False

    def _begin(self, text: str) -> None:
        # These are one line, perhaps cut short by --max-log-len.
        if " JSON body: " in text or text.lstrip().startswith("{"):
            return
        for found in _OPENING.finditer(text):
            end = re.compile(rf"(?<!\\){found[1]}{_AFTER}")
            if not end.search(text, found.end()):
                self._end, self._left = end, _MOST_LINES
                return


def said(text: str) -> bool:
    """Whether a line can only repeat what was said, or tell of what did not fail.

    Args:
        text: The line, with its prefixes.
    """
    if level := lines.level(text):
        return level in _QUIET or bool(_REQUEST.search(text))
    if record := _RECORD.match(text):
        return record[1].upper() in _QUIET or bool(_REQUEST.search(text))
    if _REQUEST.search(text):
        return True
    other = _LEVEL.search(text, 0, _LEVEL_WITHIN)
    return bool(other and other[1] in _QUIET and _CARRIES.search(text))
