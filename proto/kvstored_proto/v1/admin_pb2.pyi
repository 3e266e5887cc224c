from kvstored_proto.v1 import kvstored_pb2 as _kvstored_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListNamespacesRequest(_message.Message):
    __slots__ = ("limit", "cursor")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    limit: int
    cursor: bytes
    def __init__(self, limit: _Optional[int] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("boot_id", "namespaces", "cursor")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    cursor: bytes
    def __init__(self, boot_id: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("digest", "tenant", "fields", "dram_blocks", "dram_bytes", "nvme_blocks")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    tenant: str
    fields: _containers.ScalarMap[str, str]
    dram_blocks: int
    dram_bytes: int
    nvme_blocks: int
    def __init__(self, digest: _Optional[bytes] = ..., tenant: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ..., dram_blocks: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_blocks: _Optional[int] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("namespace_digest", "limit", "cursor")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    limit: int
    cursor: bytes
    def __init__(self, namespace_digest: _Optional[bytes] = ..., limit: _Optional[int] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ListBlocksReply(_message.Message):
    __slots__ = ("boot_id", "blocks", "cursor")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    cursor: bytes
    def __init__(self, boot_id: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("namespace_digest", "hash", "parent", "size_bytes", "state", "tiers", "holds", "content_hash", "expires_s")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    hash: bytes
    parent: bytes
    size_bytes: int
    state: str
    tiers: str
    holds: int
    content_hash: bytes
    expires_s: float
    def __init__(self, namespace_digest: _Optional[bytes] = ..., hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., state: _Optional[str] = ..., tiers: _Optional[str] = ..., holds: _Optional[int] = ..., content_hash: _Optional[bytes] = ..., expires_s: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("hash", "namespace_digest", "tenant")
    HASH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    namespace_digest: bytes
    tenant: str
    def __init__(self, hash: _Optional[bytes] = ..., namespace_digest: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("boot_id", "verdict", "detail", "blocks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    verdict: str
    detail: str
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    def __init__(self, boot_id: _Optional[int] = ..., verdict: _Optional[str] = ..., detail: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ...) -> None: ...

class FieldDifference(_message.Message):
    __slots__ = ("field", "ours", "theirs")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    OURS_FIELD_NUMBER: _ClassVar[int]
    THEIRS_FIELD_NUMBER: _ClassVar[int]
    field: str
    ours: str
    theirs: str
    def __init__(self, field: _Optional[str] = ..., ours: _Optional[str] = ..., theirs: _Optional[str] = ...) -> None: ...

class NearNamespace(_message.Message):
    __slots__ = ("digest", "fields", "differences", "dram_blocks")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    fields: _containers.ScalarMap[str, str]
    differences: _containers.RepeatedCompositeFieldContainer[FieldDifference]
    dram_blocks: int
    def __init__(self, digest: _Optional[bytes] = ..., fields: _Optional[_Mapping[str, str]] = ..., differences: _Optional[_Iterable[_Union[FieldDifference, _Mapping]]] = ..., dram_blocks: _Optional[int] = ...) -> None: ...

class ExplainChainRequest(_message.Message):
    __slots__ = ("namespace_digest", "hashes", "hash_bytes", "tenant")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    hashes: bytes
    hash_bytes: int
    tenant: str
    def __init__(self, namespace_digest: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainChainReply(_message.Message):
    __slots__ = ("boot_id", "hit_blocks", "dram_blocks", "nvme_blocks", "pending_blocks", "verdict", "detail", "missing", "stored_after", "missing_blocks", "nearest")
    class MissingBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    STORED_AFTER_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEAREST_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    hit_blocks: int
    dram_blocks: int
    nvme_blocks: int
    pending_blocks: int
    verdict: str
    detail: str
    missing: bytes
    stored_after: int
    missing_blocks: _containers.ScalarMap[str, int]
    nearest: NearNamespace
    def __init__(self, boot_id: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., pending_blocks: _Optional[int] = ..., verdict: _Optional[str] = ..., detail: _Optional[str] = ..., missing: _Optional[bytes] = ..., stored_after: _Optional[int] = ..., missing_blocks: _Optional[_Mapping[str, int]] = ..., nearest: _Optional[_Union[NearNamespace, _Mapping]] = ...) -> None: ...

class ExplainNamespaceRequest(_message.Message):
    __slots__ = ("digest", "spec", "tenant", "near_max")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NEAR_MAX_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    spec: _kvstored_pb2.NamespaceSpec
    tenant: str
    near_max: int
    def __init__(self, digest: _Optional[bytes] = ..., spec: _Optional[_Union[_kvstored_pb2.NamespaceSpec, _Mapping]] = ..., tenant: _Optional[str] = ..., near_max: _Optional[int] = ...) -> None: ...

class ExplainNamespaceReply(_message.Message):
    __slots__ = ("boot_id", "digest", "known", "tenant", "fields", "dram_blocks", "dram_bytes", "nvme_blocks", "near", "detail")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    digest: bytes
    known: bool
    tenant: str
    fields: _containers.ScalarMap[str, str]
    dram_blocks: int
    dram_bytes: int
    nvme_blocks: int
    near: _containers.RepeatedCompositeFieldContainer[NearNamespace]
    detail: str
    def __init__(self, boot_id: _Optional[int] = ..., digest: _Optional[bytes] = ..., known: bool = ..., tenant: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ..., dram_blocks: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., near: _Optional[_Iterable[_Union[NearNamespace, _Mapping]]] = ..., detail: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("boot_id", "dram_blocks", "nvme_blocks", "bytes", "corrupt", "skipped", "problems")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    dram_blocks: int
    nvme_blocks: int
    bytes: int
    corrupt: int
    skipped: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, boot_id: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., corrupt: _Optional[int] = ..., skipped: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("wait_ms",)
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    wait_ms: int
    def __init__(self, wait_ms: _Optional[int] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("boot_id", "written_blocks", "left_blocks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    written_blocks: int
    left_blocks: int
    def __init__(self, boot_id: _Optional[int] = ..., written_blocks: _Optional[int] = ..., left_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("resume", "deadline_ms")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    deadline_ms: int
    def __init__(self, resume: bool = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("boot_id", "state", "leases", "reservations", "written_blocks", "left_blocks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    state: str
    leases: int
    reservations: int
    written_blocks: int
    left_blocks: int
    def __init__(self, boot_id: _Optional[int] = ..., state: _Optional[str] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., written_blocks: _Optional[int] = ..., left_blocks: _Optional[int] = ...) -> None: ...

class AddTenantRequest(_message.Message):
    __slots__ = ("name", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SetTenantRequest(_message.Message):
    __slots__ = ("name", "fields", "reset")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: _containers.ScalarMap[str, str]
    reset: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ..., reset: _Optional[_Iterable[str]] = ...) -> None: ...

class TenantReply(_message.Message):
    __slots__ = ("boot_id", "tenant")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    tenant: TenantInfo
    def __init__(self, boot_id: _Optional[int] = ..., tenant: _Optional[_Union[TenantInfo, _Mapping]] = ...) -> None: ...

class RemoveTenantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveTenantReply(_message.Message):
    __slots__ = ("boot_id", "sessions_ended")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_ENDED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    sessions_ended: int
    def __init__(self, boot_id: _Optional[int] = ..., sessions_ended: _Optional[int] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("name", "limit", "cursor")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit: int
    cursor: bytes
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[int] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ListTenantsReply(_message.Message):
    __slots__ = ("boot_id", "tenants", "cursor")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantInfo]
    cursor: bytes
    def __init__(self, boot_id: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantInfo, _Mapping]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class TenantInfo(_message.Message):
    __slots__ = ("name", "state", "fields", "origins", "tokens", "sessions")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class OriginsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    fields: _containers.ScalarMap[str, str]
    origins: _containers.ScalarMap[str, str]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenInfo]
    sessions: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ..., origins: _Optional[_Mapping[str, str]] = ..., tokens: _Optional[_Iterable[_Union[TokenInfo, _Mapping]]] = ..., sessions: _Optional[int] = ...) -> None: ...

class TokenInfo(_message.Message):
    __slots__ = ("id", "tenant", "label", "created_s", "expires_s", "expired")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    label: str
    created_s: float
    expires_s: float
    expired: bool
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., label: _Optional[str] = ..., created_s: _Optional[float] = ..., expires_s: _Optional[float] = ..., expired: bool = ...) -> None: ...

class AddTokenRequest(_message.Message):
    __slots__ = ("tenant", "expires_in_s", "label")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    expires_in_s: float
    label: str
    def __init__(self, tenant: _Optional[str] = ..., expires_in_s: _Optional[float] = ..., label: _Optional[str] = ...) -> None: ...

class RotateTokenRequest(_message.Message):
    __slots__ = ("token_id", "grace_s", "expires_in_s")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    grace_s: float
    expires_in_s: float
    def __init__(self, token_id: _Optional[str] = ..., grace_s: _Optional[float] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class TokenReply(_message.Message):
    __slots__ = ("boot_id", "info", "token")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    info: TokenInfo
    token: str
    def __init__(self, boot_id: _Optional[int] = ..., info: _Optional[_Union[TokenInfo, _Mapping]] = ..., token: _Optional[str] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("token_id",)
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    def __init__(self, token_id: _Optional[str] = ...) -> None: ...

class RevokeTokenReply(_message.Message):
    __slots__ = ("boot_id", "sessions_ended")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_ENDED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    sessions_ended: int
    def __init__(self, boot_id: _Optional[int] = ..., sessions_ended: _Optional[int] = ...) -> None: ...

class RekeyTenantRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class RekeyTenantReply(_message.Message):
    __slots__ = ("boot_id", "keys")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    keys: int
    def __init__(self, boot_id: _Optional[int] = ..., keys: _Optional[int] = ...) -> None: ...

class ReadAuditRequest(_message.Message):
    __slots__ = ("limit", "after")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    after: int
    def __init__(self, limit: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class ReadAuditReply(_message.Message):
    __slots__ = ("boot_id", "lines")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, boot_id: _Optional[int] = ..., lines: _Optional[_Iterable[str]] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("tenant", "namespace_digest", "model", "model_version", "older_than_ms", "dry_run", "deadline_ms")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_MS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace_digest: bytes
    model: str
    model_version: str
    older_than_ms: int
    dry_run: bool
    deadline_ms: int
    def __init__(self, tenant: _Optional[str] = ..., namespace_digest: _Optional[bytes] = ..., model: _Optional[str] = ..., model_version: _Optional[str] = ..., older_than_ms: _Optional[int] = ..., dry_run: bool = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class PurgeReply(_message.Message):
    __slots__ = ("boot_id", "receipt")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    receipt: PurgeReceipt
    def __init__(self, boot_id: _Optional[int] = ..., receipt: _Optional[_Union[PurgeReceipt, _Mapping]] = ...) -> None: ...

class PurgeReceipt(_message.Message):
    __slots__ = ("purge_id", "state", "selection", "by", "begun_s", "duration_s", "phase", "steps_done", "steps", "dram_blocks", "dram_bytes", "nvme_blocks", "nvme_bytes", "dram_zeroed_bytes", "nvme_zeroed_bytes", "staging_zeroed_bytes", "leases", "leases_ended", "sessions_ended", "sessions_ended_count", "remains", "notes")
    PURGE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    BEGUN_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_ZEROED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_ZEROED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_ZEROED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASES_ENDED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_ENDED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_ENDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REMAINS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    purge_id: str
    state: str
    selection: PurgeRequest
    by: str
    begun_s: float
    duration_s: float
    phase: str
    steps_done: int
    steps: int
    dram_blocks: int
    dram_bytes: int
    nvme_blocks: int
    nvme_bytes: int
    dram_zeroed_bytes: int
    nvme_zeroed_bytes: int
    staging_zeroed_bytes: int
    leases: int
    leases_ended: int
    sessions_ended: _containers.RepeatedScalarFieldContainer[str]
    sessions_ended_count: int
    remains: _containers.RepeatedScalarFieldContainer[str]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, purge_id: _Optional[str] = ..., state: _Optional[str] = ..., selection: _Optional[_Union[PurgeRequest, _Mapping]] = ..., by: _Optional[str] = ..., begun_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., phase: _Optional[str] = ..., steps_done: _Optional[int] = ..., steps: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., dram_zeroed_bytes: _Optional[int] = ..., nvme_zeroed_bytes: _Optional[int] = ..., staging_zeroed_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., leases_ended: _Optional[int] = ..., sessions_ended: _Optional[_Iterable[str]] = ..., sessions_ended_count: _Optional[int] = ..., remains: _Optional[_Iterable[str]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class PurgeStatusRequest(_message.Message):
    __slots__ = ("purge_id",)
    PURGE_ID_FIELD_NUMBER: _ClassVar[int]
    purge_id: str
    def __init__(self, purge_id: _Optional[str] = ...) -> None: ...

class PurgeStatusReply(_message.Message):
    __slots__ = ("boot_id", "receipts")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    receipts: _containers.RepeatedCompositeFieldContainer[PurgeReceipt]
    def __init__(self, boot_id: _Optional[int] = ..., receipts: _Optional[_Iterable[_Union[PurgeReceipt, _Mapping]]] = ...) -> None: ...

class KillSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class KillSessionReply(_message.Message):
    __slots__ = ("boot_id", "leases", "reservations", "staging_bytes")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    leases: int
    reservations: int
    staging_bytes: int
    def __init__(self, boot_id: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., staging_bytes: _Optional[int] = ...) -> None: ...

class WearRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WearReply(_message.Message):
    __slots__ = ("boot_id", "paths")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    paths: _containers.RepeatedCompositeFieldContainer[PathWear]
    def __init__(self, boot_id: _Optional[int] = ..., paths: _Optional[_Iterable[_Union[PathWear, _Mapping]]] = ...) -> None: ...

class PathWear(_message.Message):
    __slots__ = ("number", "path", "today_bytes", "month_bytes", "total_bytes", "since_s", "recent_bytes", "recent_s", "endurance_bytes", "budget_bytes_per_day", "budget_left_bytes", "stored_bytes", "reinserted_bytes", "written_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TODAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MONTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    RECENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECENT_S_FIELD_NUMBER: _ClassVar[int]
    ENDURANCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REINSERTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    path: str
    today_bytes: int
    month_bytes: int
    total_bytes: int
    since_s: float
    recent_bytes: int
    recent_s: float
    endurance_bytes: int
    budget_bytes_per_day: int
    budget_left_bytes: int
    stored_bytes: int
    reinserted_bytes: int
    written_bytes: int
    def __init__(self, number: _Optional[int] = ..., path: _Optional[str] = ..., today_bytes: _Optional[int] = ..., month_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., since_s: _Optional[float] = ..., recent_bytes: _Optional[int] = ..., recent_s: _Optional[float] = ..., endurance_bytes: _Optional[int] = ..., budget_bytes_per_day: _Optional[int] = ..., budget_left_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., reinserted_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class BumpEpochRequest(_message.Message):
    __slots__ = ("model", "model_version", "tenant")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    tenant: str
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class BumpEpochReply(_message.Message):
    __slots__ = ("boot_id", "number", "namespaces", "dram_blocks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    number: int
    namespaces: int
    dram_blocks: int
    def __init__(self, boot_id: _Optional[int] = ..., number: _Optional[int] = ..., namespaces: _Optional[int] = ..., dram_blocks: _Optional[int] = ...) -> None: ...

class ListEpochsRequest(_message.Message):
    __slots__ = ("limit", "cursor")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    limit: int
    cursor: bytes
    def __init__(self, limit: _Optional[int] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ListEpochsReply(_message.Message):
    __slots__ = ("boot_id", "epochs", "cursor")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    epochs: _containers.RepeatedCompositeFieldContainer[EpochInfo]
    cursor: bytes
    def __init__(self, boot_id: _Optional[int] = ..., epochs: _Optional[_Iterable[_Union[EpochInfo, _Mapping]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class EpochInfo(_message.Message):
    __slots__ = ("tenant", "model", "model_version", "number", "taking_back")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TAKING_BACK_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    model_version: str
    number: int
    taking_back: bool
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., model_version: _Optional[str] = ..., number: _Optional[int] = ..., taking_back: bool = ...) -> None: ...

class StartTraceRequest(_message.Message):
    __slots__ = ("size_limit_bytes", "time_limit_s")
    SIZE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    size_limit_bytes: int
    time_limit_s: float
    def __init__(self, size_limit_bytes: _Optional[int] = ..., time_limit_s: _Optional[float] = ...) -> None: ...

class StopTraceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TraceStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ("boot_id", "active", "path", "calls", "dropped_calls", "size_bytes", "seconds", "ended")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_CALLS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    active: bool
    path: str
    calls: int
    dropped_calls: int
    size_bytes: int
    seconds: float
    ended: str
    def __init__(self, boot_id: _Optional[int] = ..., active: bool = ..., path: _Optional[str] = ..., calls: _Optional[int] = ..., dropped_calls: _Optional[int] = ..., size_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., ended: _Optional[str] = ...) -> None: ...

class PolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("eviction",)
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    eviction: str
    def __init__(self, eviction: _Optional[str] = ...) -> None: ...

class PolicyReply(_message.Message):
    __slots__ = ("boot_id", "eviction", "configured_eviction", "changing", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_EVICTION_FIELD_NUMBER: _ClassVar[int]
    CHANGING_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    eviction: str
    configured_eviction: str
    changing: bool
    settings: _containers.ScalarMap[str, str]
    def __init__(self, boot_id: _Optional[int] = ..., eviction: _Optional[str] = ..., configured_eviction: _Optional[str] = ..., changing: bool = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsReply(_message.Message):
    __slots__ = ("boot_id", "pins", "limits")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    pins: _containers.RepeatedCompositeFieldContainer[PinInfo]
    limits: _containers.RepeatedCompositeFieldContainer[PinLimit]
    def __init__(self, boot_id: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinInfo, _Mapping]]] = ..., limits: _Optional[_Iterable[_Union[PinLimit, _Mapping]]] = ...) -> None: ...

class PinInfo(_message.Message):
    __slots__ = ("namespace_digest", "tenant", "hard_blocks", "hard_bytes", "soft_blocks", "soft_bytes", "final_blocks", "preferred_blocks", "longest_s")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HARD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_S_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    tenant: str
    hard_blocks: int
    hard_bytes: int
    soft_blocks: int
    soft_bytes: int
    final_blocks: int
    preferred_blocks: int
    longest_s: float
    def __init__(self, namespace_digest: _Optional[bytes] = ..., tenant: _Optional[str] = ..., hard_blocks: _Optional[int] = ..., hard_bytes: _Optional[int] = ..., soft_blocks: _Optional[int] = ..., soft_bytes: _Optional[int] = ..., final_blocks: _Optional[int] = ..., preferred_blocks: _Optional[int] = ..., longest_s: _Optional[float] = ...) -> None: ...

class PinLimit(_message.Message):
    __slots__ = ("tenant", "hard_pinned_bytes", "hard_pin_bytes", "final_wrong_share")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HARD_PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HARD_PIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINAL_WRONG_SHARE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    hard_pinned_bytes: int
    hard_pin_bytes: int
    final_wrong_share: float
    def __init__(self, tenant: _Optional[str] = ..., hard_pinned_bytes: _Optional[int] = ..., hard_pin_bytes: _Optional[int] = ..., final_wrong_share: _Optional[float] = ...) -> None: ...
