from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPERATION_UNSPECIFIED: _ClassVar[Operation]
    OPERATION_OPEN_SESSION: _ClassVar[Operation]
    OPERATION_KEEP_ALIVE: _ClassVar[Operation]
    OPERATION_CLOSE_SESSION: _ClassVar[Operation]
    OPERATION_OPEN_NAMESPACE: _ClassVar[Operation]
    OPERATION_LOOKUP: _ClassVar[Operation]
    OPERATION_CONTAINS: _ClassVar[Operation]
    OPERATION_RESERVE: _ClassVar[Operation]
    OPERATION_COMMIT: _ClassVar[Operation]
    OPERATION_ABORT: _ClassVar[Operation]
    OPERATION_GET: _ClassVar[Operation]
    OPERATION_ATTACH: _ClassVar[Operation]
    OPERATION_RELEASE: _ClassVar[Operation]
    OPERATION_PREFETCH: _ClassVar[Operation]
    OPERATION_POLL_PREFETCH: _ClassVar[Operation]
    OPERATION_CANCEL_PREFETCH: _ClassVar[Operation]
    OPERATION_TOUCH: _ClassVar[Operation]
    OPERATION_DELETE: _ClassVar[Operation]
    OPERATION_STATUS: _ClassVar[Operation]
    OPERATION_SEGMENTS_DROPPED: _ClassVar[Operation]
    OPERATION_HINT: _ClassVar[Operation]
    OPERATION_REGISTER_MEMORY: _ClassVar[Operation]
    OPERATION_UNREGISTER_MEMORY: _ClassVar[Operation]
    OPERATION_LOAD: _ClassVar[Operation]
    OPERATION_STORE: _ClassVar[Operation]
    OPERATION_CANCEL_TRANSFER: _ClassVar[Operation]
    OPERATION_OFFER_DESCRIPTORS: _ClassVar[Operation]
    OPERATION_STORE_LAYERS: _ClassVar[Operation]
    OPERATION_LIST_NAMESPACES: _ClassVar[Operation]
    OPERATION_LIST_BLOCKS: _ClassVar[Operation]
    OPERATION_EXPLAIN: _ClassVar[Operation]
    OPERATION_VERIFY: _ClassVar[Operation]
    OPERATION_FLUSH: _ClassVar[Operation]
    OPERATION_DRAIN: _ClassVar[Operation]
    OPERATION_ADD_TENANT: _ClassVar[Operation]
    OPERATION_SET_TENANT: _ClassVar[Operation]
    OPERATION_REMOVE_TENANT: _ClassVar[Operation]
    OPERATION_LIST_TENANTS: _ClassVar[Operation]
    OPERATION_ADD_TOKEN: _ClassVar[Operation]
    OPERATION_ROTATE_TOKEN: _ClassVar[Operation]
    OPERATION_REVOKE_TOKEN: _ClassVar[Operation]
    OPERATION_READ_AUDIT: _ClassVar[Operation]
    OPERATION_PURGE: _ClassVar[Operation]
    OPERATION_PURGE_STATUS: _ClassVar[Operation]
    OPERATION_KILL_SESSION: _ClassVar[Operation]
    OPERATION_REKEY_TENANT: _ClassVar[Operation]
    OPERATION_EXPLAIN_CHAIN: _ClassVar[Operation]
    OPERATION_EXPLAIN_NAMESPACE: _ClassVar[Operation]
    OPERATION_BUMP_EPOCH: _ClassVar[Operation]
    OPERATION_LIST_EPOCHS: _ClassVar[Operation]
    OPERATION_WEAR: _ClassVar[Operation]
    OPERATION_START_TRACE: _ClassVar[Operation]
    OPERATION_STOP_TRACE: _ClassVar[Operation]
    OPERATION_TRACE_STATUS: _ClassVar[Operation]
    OPERATION_POLICY: _ClassVar[Operation]
    OPERATION_SET_POLICY: _ClassVar[Operation]
    OPERATION_LIST_PINS: _ClassVar[Operation]
    OPERATION_SEGMENTS: _ClassVar[Operation]
    OPERATION_SEGMENTS_RETIRED: _ClassVar[Operation]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_MISS: _ClassVar[Outcome]
    OUTCOME_HIT: _ClassVar[Outcome]
    OUTCOME_PENDING: _ClassVar[Outcome]
    OUTCOME_THROTTLED: _ClassVar[Outcome]
    OUTCOME_NO_ROOM: _ClassVar[Outcome]
    OUTCOME_RESERVED: _ClassVar[Outcome]
    OUTCOME_NOT_DURABLE: _ClassVar[Outcome]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_NVME: _ClassVar[Durability]
OPERATION_UNSPECIFIED: Operation
OPERATION_OPEN_SESSION: Operation
OPERATION_KEEP_ALIVE: Operation
OPERATION_CLOSE_SESSION: Operation
OPERATION_OPEN_NAMESPACE: Operation
OPERATION_LOOKUP: Operation
OPERATION_CONTAINS: Operation
OPERATION_RESERVE: Operation
OPERATION_COMMIT: Operation
OPERATION_ABORT: Operation
OPERATION_GET: Operation
OPERATION_ATTACH: Operation
OPERATION_RELEASE: Operation
OPERATION_PREFETCH: Operation
OPERATION_POLL_PREFETCH: Operation
OPERATION_CANCEL_PREFETCH: Operation
OPERATION_TOUCH: Operation
OPERATION_DELETE: Operation
OPERATION_STATUS: Operation
OPERATION_SEGMENTS_DROPPED: Operation
OPERATION_HINT: Operation
OPERATION_REGISTER_MEMORY: Operation
OPERATION_UNREGISTER_MEMORY: Operation
OPERATION_LOAD: Operation
OPERATION_STORE: Operation
OPERATION_CANCEL_TRANSFER: Operation
OPERATION_OFFER_DESCRIPTORS: Operation
OPERATION_STORE_LAYERS: Operation
OPERATION_LIST_NAMESPACES: Operation
OPERATION_LIST_BLOCKS: Operation
OPERATION_EXPLAIN: Operation
OPERATION_VERIFY: Operation
OPERATION_FLUSH: Operation
OPERATION_DRAIN: Operation
OPERATION_ADD_TENANT: Operation
OPERATION_SET_TENANT: Operation
OPERATION_REMOVE_TENANT: Operation
OPERATION_LIST_TENANTS: Operation
OPERATION_ADD_TOKEN: Operation
OPERATION_ROTATE_TOKEN: Operation
OPERATION_REVOKE_TOKEN: Operation
OPERATION_READ_AUDIT: Operation
OPERATION_PURGE: Operation
OPERATION_PURGE_STATUS: Operation
OPERATION_KILL_SESSION: Operation
OPERATION_REKEY_TENANT: Operation
OPERATION_EXPLAIN_CHAIN: Operation
OPERATION_EXPLAIN_NAMESPACE: Operation
OPERATION_BUMP_EPOCH: Operation
OPERATION_LIST_EPOCHS: Operation
OPERATION_WEAR: Operation
OPERATION_START_TRACE: Operation
OPERATION_STOP_TRACE: Operation
OPERATION_TRACE_STATUS: Operation
OPERATION_POLICY: Operation
OPERATION_SET_POLICY: Operation
OPERATION_LIST_PINS: Operation
OPERATION_SEGMENTS: Operation
OPERATION_SEGMENTS_RETIRED: Operation
OUTCOME_MISS: Outcome
OUTCOME_HIT: Outcome
OUTCOME_PENDING: Outcome
OUTCOME_THROTTLED: Outcome
OUTCOME_NO_ROOM: Outcome
OUTCOME_RESERVED: Outcome
OUTCOME_NOT_DURABLE: Outcome
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_NVME: Durability

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "features", "client_name", "client_version", "token", "staging_bytes", "create_group", "join_group", "resume")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATE_GROUP_FIELD_NUMBER: _ClassVar[int]
    JOIN_GROUP_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    features: _containers.RepeatedScalarFieldContainer[str]
    client_name: str
    client_version: str
    token: str
    staging_bytes: int
    create_group: bool
    join_group: bytes
    resume: Resume
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., client_name: _Optional[str] = ..., client_version: _Optional[str] = ..., token: _Optional[str] = ..., staging_bytes: _Optional[int] = ..., create_group: bool = ..., join_group: _Optional[bytes] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("client_id", "lease_ids")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    client_id: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, client_id: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenSessionReply(_message.Message):
    __slots__ = ("boot_id", "protocol", "features", "session_id", "tenant", "role", "group_id", "staging_bytes", "daemon_version", "limits", "idle_timeout_ms", "resumed_leases")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_LEASES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    protocol: int
    features: _containers.RepeatedScalarFieldContainer[str]
    session_id: bytes
    tenant: str
    role: str
    group_id: bytes
    staging_bytes: int
    daemon_version: str
    limits: Limits
    idle_timeout_ms: int
    resumed_leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, boot_id: _Optional[int] = ..., protocol: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., session_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., role: _Optional[str] = ..., group_id: _Optional[bytes] = ..., staging_bytes: _Optional[int] = ..., daemon_version: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., idle_timeout_ms: _Optional[int] = ..., resumed_leases: _Optional[_Iterable[int]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_blocks_per_call", "max_block_bytes", "max_leases", "max_reservations")
    MAX_BLOCKS_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    max_blocks_per_call: int
    max_block_bytes: int
    max_leases: int
    max_reservations: int
    def __init__(self, max_blocks_per_call: _Optional[int] = ..., max_block_bytes: _Optional[int] = ..., max_leases: _Optional[int] = ..., max_reservations: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepAliveReply(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    def __init__(self, boot_id: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    def __init__(self, boot_id: _Optional[int] = ...) -> None: ...

class Segments(_message.Message):
    __slots__ = ("segments", "staging", "session_page")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    SESSION_PAGE_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    staging: bool
    session_page: bool
    def __init__(self, segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., staging: bool = ..., session_page: bool = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("id", "size_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    size_bytes: int
    def __init__(self, id: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class SegmentIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class NamespaceSpec(_message.Message):
    __slots__ = ("model", "model_version", "tokenizer_version", "template_version", "permission_version", "rope_theta", "rope_scaling", "dtype", "layers", "kv_heads", "head_dim", "block_tokens", "layout", "tp_rank", "tp_size", "pp_rank", "pp_size", "quantization", "adapter", "kv_group", "kv_group_kind", "window_tokens", "engine_format", "extra")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PERMISSION_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROPE_THETA_FIELD_NUMBER: _ClassVar[int]
    ROPE_SCALING_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_KIND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_version: str
    tokenizer_version: str
    template_version: str
    permission_version: str
    rope_theta: float
    rope_scaling: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    layout: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    quantization: str
    adapter: str
    kv_group: int
    kv_group_kind: str
    window_tokens: int
    engine_format: str
    extra: str
    def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., tokenizer_version: _Optional[str] = ..., template_version: _Optional[str] = ..., permission_version: _Optional[str] = ..., rope_theta: _Optional[float] = ..., rope_scaling: _Optional[str] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_tokens: _Optional[int] = ..., layout: _Optional[str] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ..., quantization: _Optional[str] = ..., adapter: _Optional[str] = ..., kv_group: _Optional[int] = ..., kv_group_kind: _Optional[str] = ..., window_tokens: _Optional[int] = ..., engine_format: _Optional[str] = ..., extra: _Optional[str] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("spec", "durability", "ttl_ms", "sliding_ttl")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_TTL_FIELD_NUMBER: _ClassVar[int]
    spec: NamespaceSpec
    durability: Durability
    ttl_ms: int
    sliding_ttl: bool
    def __init__(self, spec: _Optional[_Union[NamespaceSpec, _Mapping]] = ..., durability: _Optional[_Union[Durability, str]] = ..., ttl_ms: _Optional[int] = ..., sliding_ttl: bool = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("boot_id", "namespace_id", "digest", "chain_seed")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_SEED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    namespace_id: int
    digest: bytes
    chain_seed: bytes
    def __init__(self, boot_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., digest: _Optional[bytes] = ..., chain_seed: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace_ids", "hashes", "hash_bytes", "prefill_tokens_per_s", "prefetch", "prefetch_deadline_ms")
    NAMESPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    namespace_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    hash_bytes: int
    prefill_tokens_per_s: float
    prefetch: bool
    prefetch_deadline_ms: int
    def __init__(self, namespace_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., prefetch: bool = ..., prefetch_deadline_ms: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("boot_id", "prefix_blocks", "ready_blocks", "dram_blocks", "nvme_blocks", "pending_blocks", "next", "load_s", "recompute_s", "paying_blocks", "prefetch_id", "queued_blocks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    PAYING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    prefix_blocks: int
    ready_blocks: int
    dram_blocks: int
    nvme_blocks: int
    pending_blocks: int
    next: Outcome
    load_s: float
    recompute_s: float
    paying_blocks: int
    prefetch_id: int
    queued_blocks: int
    def __init__(self, boot_id: _Optional[int] = ..., prefix_blocks: _Optional[int] = ..., ready_blocks: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., pending_blocks: _Optional[int] = ..., next: _Optional[_Union[Outcome, str]] = ..., load_s: _Optional[float] = ..., recompute_s: _Optional[float] = ..., paying_blocks: _Optional[int] = ..., prefetch_id: _Optional[int] = ..., queued_blocks: _Optional[int] = ...) -> None: ...

class ContainsRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "hash_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    hash_bytes: int
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ...) -> None: ...

class ContainsReply(_message.Message):
    __slots__ = ("boot_id", "outcomes", "tiers")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    outcomes: bytes
    tiers: bytes
    def __init__(self, boot_id: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("namespace_ids", "hashes", "hash_bytes", "wait_ms")
    NAMESPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    namespace_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    hash_bytes: int
    wait_ms: int
    def __init__(self, namespace_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("boot_id", "blocks", "next", "leases")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    blocks: int
    next: Outcome
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, boot_id: _Optional[int] = ..., blocks: _Optional[int] = ..., next: _Optional[_Union[Outcome, str]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "namespace_id", "slots", "heads")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    namespace_id: int
    slots: bytes
    heads: bytes
    def __init__(self, lease_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., slots: _Optional[bytes] = ..., heads: _Optional[bytes] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("boot_id", "released")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    released: int
    def __init__(self, boot_id: _Optional[int] = ..., released: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("namespace_ids", "hashes", "hash_bytes", "deadline_ms", "priority")
    NAMESPACE_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    namespace_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    hash_bytes: int
    deadline_ms: int
    priority: int
    def __init__(self, namespace_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("boot_id", "prefetch_id", "outcome", "resident_blocks", "queued_blocks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    prefetch_id: int
    outcome: Outcome
    resident_blocks: int
    queued_blocks: int
    def __init__(self, boot_id: _Optional[int] = ..., prefetch_id: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., resident_blocks: _Optional[int] = ..., queued_blocks: _Optional[int] = ...) -> None: ...

class PollPrefetchRequest(_message.Message):
    __slots__ = ("prefetch_id", "wait_ms")
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    prefetch_id: int
    wait_ms: int
    def __init__(self, prefetch_id: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class CancelPrefetchRequest(_message.Message):
    __slots__ = ("prefetch_id",)
    PREFETCH_ID_FIELD_NUMBER: _ClassVar[int]
    prefetch_id: int
    def __init__(self, prefetch_id: _Optional[int] = ...) -> None: ...

class PollPrefetchReply(_message.Message):
    __slots__ = ("boot_id", "done", "ready_blocks", "failed_blocks", "total_blocks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    done: bool
    ready_blocks: int
    failed_blocks: int
    total_blocks: int
    def __init__(self, boot_id: _Optional[int] = ..., done: bool = ..., ready_blocks: _Optional[int] = ..., failed_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "hash_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    hash_bytes: int
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ...) -> None: ...

class TouchReply(_message.Message):
    __slots__ = ("boot_id", "touched")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    touched: int
    def __init__(self, boot_id: _Optional[int] = ..., touched: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "hash_bytes", "parent", "block_bytes", "sizes_bytes", "wait_ms", "durability", "ttl_ms", "sliding_ttl", "hints")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZES_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_TTL_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    hash_bytes: int
    parent: bytes
    block_bytes: int
    sizes_bytes: _containers.RepeatedScalarFieldContainer[int]
    wait_ms: int
    durability: Durability
    ttl_ms: int
    sliding_ttl: bool
    hints: PutHints
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., parent: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., sizes_bytes: _Optional[_Iterable[int]] = ..., wait_ms: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., ttl_ms: _Optional[int] = ..., sliding_ttl: bool = ..., hints: _Optional[_Union[PutHints, _Mapping]] = ...) -> None: ...

class PutHints(_message.Message):
    __slots__ = ("priority", "soft_pin_ms", "hard_pin_ms", "continues", "final")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SOFT_PIN_MS_FIELD_NUMBER: _ClassVar[int]
    HARD_PIN_MS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    priority: int
    soft_pin_ms: int
    hard_pin_ms: int
    continues: bool
    final: bool
    def __init__(self, priority: _Optional[int] = ..., soft_pin_ms: _Optional[int] = ..., hard_pin_ms: _Optional[int] = ..., continues: bool = ..., final: bool = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("boot_id", "reservation_id", "outcomes", "retry_after_ms", "staging_wipes")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    STAGING_WIPES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    reservation_id: int
    outcomes: bytes
    retry_after_ms: int
    staging_wipes: int
    def __init__(self, boot_id: _Optional[int] = ..., reservation_id: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., retry_after_ms: _Optional[int] = ..., staging_wipes: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation_id", "indices", "staging_offsets", "streamed", "progress_offset")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    STREAMED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    staging_offsets: _containers.RepeatedScalarFieldContainer[int]
    streamed: bool
    progress_offset: int
    def __init__(self, reservation_id: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., staging_offsets: _Optional[_Iterable[int]] = ..., streamed: bool = ..., progress_offset: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("boot_id", "outcomes")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    outcomes: bytes
    def __init__(self, boot_id: _Optional[int] = ..., outcomes: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation_id", "indices")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation_id: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    def __init__(self, boot_id: _Optional[int] = ...) -> None: ...

class RegisterMemoryRequest(_message.Message):
    __slots__ = ("device_uuid", "regions", "fragments", "blocks", "layer_fragments", "not_exportable", "memory_number", "chunk_bytes")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    NOT_EXPORTABLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_uuid: bytes
    regions: _containers.RepeatedCompositeFieldContainer[MemoryRegion]
    fragments: _containers.RepeatedCompositeFieldContainer[MemoryFragment]
    blocks: int
    layer_fragments: _containers.RepeatedScalarFieldContainer[int]
    not_exportable: str
    memory_number: int
    chunk_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device_uuid: _Optional[bytes] = ..., regions: _Optional[_Iterable[_Union[MemoryRegion, _Mapping]]] = ..., fragments: _Optional[_Iterable[_Union[MemoryFragment, _Mapping]]] = ..., blocks: _Optional[int] = ..., layer_fragments: _Optional[_Iterable[int]] = ..., not_exportable: _Optional[str] = ..., memory_number: _Optional[int] = ..., chunk_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class OfferDescriptors(_message.Message):
    __slots__ = ("memory_number",)
    MEMORY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    memory_number: int
    def __init__(self, memory_number: _Optional[int] = ...) -> None: ...

class MemoryRegion(_message.Message):
    __slots__ = ("ipc_handle", "offset", "size_bytes", "probe", "probe_end")
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    PROBE_END_FIELD_NUMBER: _ClassVar[int]
    ipc_handle: bytes
    offset: int
    size_bytes: int
    probe: bytes
    probe_end: bytes
    def __init__(self, ipc_handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ..., probe: _Optional[bytes] = ..., probe_end: _Optional[bytes] = ...) -> None: ...

class MemoryFragment(_message.Message):
    __slots__ = ("region", "offset", "stride", "size_bytes")
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    region: int
    offset: int
    stride: int
    size_bytes: int
    def __init__(self, region: _Optional[int] = ..., offset: _Optional[int] = ..., stride: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class RegisterMemoryReply(_message.Message):
    __slots__ = ("boot_id", "registration_id", "reason", "retry_after_ms")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    registration_id: int
    reason: str
    retry_after_ms: int
    def __init__(self, boot_id: _Optional[int] = ..., registration_id: _Optional[int] = ..., reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class UnregisterMemoryRequest(_message.Message):
    __slots__ = ("registration_id",)
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    registration_id: int
    def __init__(self, registration_id: _Optional[int] = ...) -> None: ...

class UnregisterMemoryReply(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    def __init__(self, boot_id: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("registration_id", "namespace_id", "hashes", "hash_bytes", "block_ids", "wait_ms", "transfer_id", "done_word", "first_layer", "layers", "layers_word", "deadline_ms")
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    DONE_WORD_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_WORD_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    registration_id: int
    namespace_id: int
    hashes: bytes
    hash_bytes: int
    block_ids: bytes
    wait_ms: int
    transfer_id: int
    done_word: int
    first_layer: int
    layers: int
    layers_word: int
    deadline_ms: int
    def __init__(self, registration_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., wait_ms: _Optional[int] = ..., transfer_id: _Optional[int] = ..., done_word: _Optional[int] = ..., first_layer: _Optional[int] = ..., layers: _Optional[int] = ..., layers_word: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("boot_id", "blocks", "next", "error")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    blocks: int
    next: Outcome
    error: str
    def __init__(self, boot_id: _Optional[int] = ..., blocks: _Optional[int] = ..., next: _Optional[_Union[Outcome, str]] = ..., error: _Optional[str] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("registration_id", "namespace_id", "hashes", "hash_bytes", "block_ids", "parent", "wait_ms", "durability", "ttl_ms", "sliding_ttl", "hints", "transfer_id", "done_word", "deadline_ms", "by_layers", "layers_word")
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_TTL_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    DONE_WORD_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    BY_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_WORD_FIELD_NUMBER: _ClassVar[int]
    registration_id: int
    namespace_id: int
    hashes: bytes
    hash_bytes: int
    block_ids: bytes
    parent: bytes
    wait_ms: int
    durability: Durability
    ttl_ms: int
    sliding_ttl: bool
    hints: PutHints
    transfer_id: int
    done_word: int
    deadline_ms: int
    by_layers: bool
    layers_word: int
    def __init__(self, registration_id: _Optional[int] = ..., namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., wait_ms: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., ttl_ms: _Optional[int] = ..., sliding_ttl: bool = ..., hints: _Optional[_Union[PutHints, _Mapping]] = ..., transfer_id: _Optional[int] = ..., done_word: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., by_layers: bool = ..., layers_word: _Optional[int] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("boot_id", "outcomes", "written", "retry_after_ms", "error")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    outcomes: bytes
    written: bytes
    retry_after_ms: int
    error: str
    def __init__(self, boot_id: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., written: _Optional[bytes] = ..., retry_after_ms: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class StoreLayersRequest(_message.Message):
    __slots__ = ("transfer_id", "layers")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    layers: int
    def __init__(self, transfer_id: _Optional[int] = ..., layers: _Optional[int] = ...) -> None: ...

class StoreLayersReply(_message.Message):
    __slots__ = ("boot_id", "found")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    found: bool
    def __init__(self, boot_id: _Optional[int] = ..., found: bool = ...) -> None: ...

class CancelTransferRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    def __init__(self, transfer_id: _Optional[int] = ...) -> None: ...

class CancelTransferReply(_message.Message):
    __slots__ = ("boot_id", "found")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    found: bool
    def __init__(self, boot_id: _Optional[int] = ..., found: bool = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "hash_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    hash_bytes: int
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("boot_id", "deleted")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    deleted: int
    def __init__(self, boot_id: _Optional[int] = ..., deleted: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "hash_bytes", "priority", "ttl_ms", "soft_pin_ms", "hard_pin_ms", "continues", "final", "unpin")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SOFT_PIN_MS_FIELD_NUMBER: _ClassVar[int]
    HARD_PIN_MS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    hash_bytes: int
    priority: int
    ttl_ms: int
    soft_pin_ms: int
    hard_pin_ms: int
    continues: bool
    final: bool
    unpin: bool
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., priority: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., soft_pin_ms: _Optional[int] = ..., hard_pin_ms: _Optional[int] = ..., continues: bool = ..., final: bool = ..., unpin: bool = ...) -> None: ...

class HintReply(_message.Message):
    __slots__ = ("boot_id", "blocks", "applied_blocks", "hard_pinned_bytes")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HARD_PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    blocks: int
    applied_blocks: int
    hard_pinned_bytes: int
    def __init__(self, boot_id: _Optional[int] = ..., blocks: _Optional[int] = ..., applied_blocks: _Optional[int] = ..., hard_pinned_bytes: _Optional[int] = ...) -> None: ...

class PutInlineRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutInlineHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[PutInlineHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutInlineHeader(_message.Message):
    __slots__ = ("namespace_id", "hash", "parent", "size_bytes", "durability", "ttl_ms", "sliding_ttl", "hints")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_TTL_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hash: bytes
    parent: bytes
    size_bytes: int
    durability: Durability
    ttl_ms: int
    sliding_ttl: bool
    hints: PutHints
    def __init__(self, namespace_id: _Optional[int] = ..., hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., ttl_ms: _Optional[int] = ..., sliding_ttl: bool = ..., hints: _Optional[_Union[PutHints, _Mapping]] = ...) -> None: ...

class PutInlineReply(_message.Message):
    __slots__ = ("boot_id", "outcomes")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    outcomes: bytes
    def __init__(self, boot_id: _Optional[int] = ..., outcomes: _Optional[bytes] = ...) -> None: ...

class GetInlineRequest(_message.Message):
    __slots__ = ("namespace_id", "hashes", "hash_bytes", "wait_ms")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    hashes: bytes
    hash_bytes: int
    wait_ms: int
    def __init__(self, namespace_id: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class GetInlineReply(_message.Message):
    __slots__ = ("boot_id", "index", "size_bytes", "chunk", "content_hash")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    index: int
    size_bytes: int
    chunk: bytes
    content_hash: bytes
    def __init__(self, boot_id: _Optional[int] = ..., index: _Optional[int] = ..., size_bytes: _Optional[int] = ..., chunk: _Optional[bytes] = ..., content_hash: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("boot_id", "version", "state", "uptime_s", "pid", "tiers", "tenants", "sessions", "warnings", "counters", "load_costs", "gpus")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class GpusEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_COSTS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    version: str
    state: str
    uptime_s: float
    pid: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    counters: _containers.ScalarMap[str, int]
    load_costs: LoadCosts
    gpus: _containers.ScalarMap[str, str]
    def __init__(self, boot_id: _Optional[int] = ..., version: _Optional[str] = ..., state: _Optional[str] = ..., uptime_s: _Optional[float] = ..., pid: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., counters: _Optional[_Mapping[str, int]] = ..., load_costs: _Optional[_Union[LoadCosts, _Mapping]] = ..., gpus: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LoadCosts(_message.Message):
    __slots__ = ("copy_bytes_per_s", "read_bytes_per_s", "read_latency_s", "ahead_bytes", "copies", "reads")
    COPY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    READ_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    copy_bytes_per_s: float
    read_bytes_per_s: float
    read_latency_s: float
    ahead_bytes: int
    copies: int
    reads: int
    def __init__(self, copy_bytes_per_s: _Optional[float] = ..., read_bytes_per_s: _Optional[float] = ..., read_latency_s: _Optional[float] = ..., ahead_bytes: _Optional[int] = ..., copies: _Optional[int] = ..., reads: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "health", "capacity_bytes", "used_bytes", "dead_bytes", "retired_bytes", "free_bytes", "blocks", "properties", "paths")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    name: str
    health: str
    capacity_bytes: int
    used_bytes: int
    dead_bytes: int
    retired_bytes: int
    free_bytes: int
    blocks: int
    properties: _containers.ScalarMap[str, str]
    paths: _containers.RepeatedCompositeFieldContainer[PathStatus]
    def __init__(self, name: _Optional[str] = ..., health: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., dead_bytes: _Optional[int] = ..., retired_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., properties: _Optional[_Mapping[str, str]] = ..., paths: _Optional[_Iterable[_Union[PathStatus, _Mapping]]] = ...) -> None: ...

class PathStatus(_message.Message):
    __slots__ = ("number", "path", "health", "reason", "since_s", "retry_in_s", "direct_io", "scrubbed_bytes", "scrub_corrupt_blocks", "scrub_passed_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    RETRY_IN_S_FIELD_NUMBER: _ClassVar[int]
    DIRECT_IO_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SCRUB_PASSED_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    path: str
    health: str
    reason: str
    since_s: float
    retry_in_s: float
    direct_io: bool
    scrubbed_bytes: int
    scrub_corrupt_blocks: int
    scrub_passed_s: float
    def __init__(self, number: _Optional[int] = ..., path: _Optional[str] = ..., health: _Optional[str] = ..., reason: _Optional[str] = ..., since_s: _Optional[float] = ..., retry_in_s: _Optional[float] = ..., direct_io: bool = ..., scrubbed_bytes: _Optional[int] = ..., scrub_corrupt_blocks: _Optional[int] = ..., scrub_passed_s: _Optional[float] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("name", "dram_bytes", "dram_blocks", "nvme_bytes", "nvme_blocks", "lookups", "blocks_asked", "blocks_hit", "blocks_put", "blocks_looked_up", "blocks_found", "miss_reasons", "dram_limit_bytes", "dram_limited", "dram_guaranteed_bytes", "nvme_limit_bytes", "nvme_limited", "nvme_guaranteed_bytes", "weight", "puts_throttled", "puts_over_rate", "gets_throttled")
    class MissReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ASKED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HIT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PUT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOOKED_UP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FOUND_FIELD_NUMBER: _ClassVar[int]
    MISS_REASONS_FIELD_NUMBER: _ClassVar[int]
    DRAM_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_LIMITED_FIELD_NUMBER: _ClassVar[int]
    DRAM_GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_LIMITED_FIELD_NUMBER: _ClassVar[int]
    NVME_GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PUTS_THROTTLED_FIELD_NUMBER: _ClassVar[int]
    PUTS_OVER_RATE_FIELD_NUMBER: _ClassVar[int]
    GETS_THROTTLED_FIELD_NUMBER: _ClassVar[int]
    name: str
    dram_bytes: int
    dram_blocks: int
    nvme_bytes: int
    nvme_blocks: int
    lookups: int
    blocks_asked: int
    blocks_hit: int
    blocks_put: int
    blocks_looked_up: int
    blocks_found: int
    miss_reasons: _containers.ScalarMap[str, int]
    dram_limit_bytes: int
    dram_limited: bool
    dram_guaranteed_bytes: int
    nvme_limit_bytes: int
    nvme_limited: bool
    nvme_guaranteed_bytes: int
    weight: float
    puts_throttled: int
    puts_over_rate: int
    gets_throttled: int
    def __init__(self, name: _Optional[str] = ..., dram_bytes: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., lookups: _Optional[int] = ..., blocks_asked: _Optional[int] = ..., blocks_hit: _Optional[int] = ..., blocks_put: _Optional[int] = ..., blocks_looked_up: _Optional[int] = ..., blocks_found: _Optional[int] = ..., miss_reasons: _Optional[_Mapping[str, int]] = ..., dram_limit_bytes: _Optional[int] = ..., dram_limited: bool = ..., dram_guaranteed_bytes: _Optional[int] = ..., nvme_limit_bytes: _Optional[int] = ..., nvme_limited: bool = ..., nvme_guaranteed_bytes: _Optional[int] = ..., weight: _Optional[float] = ..., puts_throttled: _Optional[int] = ..., puts_over_rate: _Optional[int] = ..., gets_throttled: _Optional[int] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("id", "tenant", "client", "transport", "pid", "uid", "leases", "reservations", "leased_bytes", "staging_bytes", "age_s", "isolation")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    client: str
    transport: str
    pid: int
    uid: int
    leases: int
    reservations: int
    leased_bytes: int
    staging_bytes: int
    age_s: float
    isolation: str
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., client: _Optional[str] = ..., transport: _Optional[str] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., isolation: _Optional[str] = ...) -> None: ...
