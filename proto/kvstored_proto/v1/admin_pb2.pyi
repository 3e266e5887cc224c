from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("boot_id", "namespaces")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, boot_id: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("namespace_digest", "hash", "parent", "size_bytes", "state", "tiers", "holds", "content_hash")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    hash: bytes
    parent: bytes
    size_bytes: int
    state: str
    tiers: str
    holds: int
    content_hash: bytes
    def __init__(self, namespace_digest: _Optional[bytes] = ..., hash: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., state: _Optional[str] = ..., tiers: _Optional[str] = ..., holds: _Optional[int] = ..., content_hash: _Optional[bytes] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("hash", "namespace_digest")
    HASH_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    namespace_digest: bytes
    def __init__(self, hash: _Optional[bytes] = ..., namespace_digest: _Optional[bytes] = ...) -> None: ...

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

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("boot_id", "dram_blocks", "nvme_blocks", "bytes", "corrupt", "skipped")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    dram_blocks: int
    nvme_blocks: int
    bytes: int
    corrupt: int
    skipped: int
    def __init__(self, boot_id: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., corrupt: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

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
