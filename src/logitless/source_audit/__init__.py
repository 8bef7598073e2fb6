"""Reads another project's source, and never runs it: is its LM head fused into the loss?"""

from logitless.source_audit.audit import SourceAudit as SourceAudit
from logitless.source_audit.audit import source_audit as source_audit
