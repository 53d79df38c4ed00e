"""The audit: whether a reward says what it should, before a night is trained on it.

Invariant: nothing is changed, neither runs nor rewards nor caches. What the record alone can tell is always
checked; with the reward function, the judge or people's labels at hand, more is.
"""

from art_core.rewards.audit.auditing import aaudit, audit
from art_core.rewards.audit.finding import Finding, Severity
from art_core.rewards.audit.report import AuditReport, Looked

__all__ = ["AuditReport", "Finding", "Looked", "Severity", "aaudit", "audit"]
