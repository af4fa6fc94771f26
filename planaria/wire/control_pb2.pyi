from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Policy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_UNSPECIFIED: _ClassVar[Policy]
    POLICY_REDISTRIBUTE: _ClassVar[Policy]
    POLICY_SHRINK: _ClassVar[Policy]
    POLICY_SPARE: _ClassVar[Policy]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_STARTING: _ClassVar[Phase]
    PHASE_PARKED: _ClassVar[Phase]
    PHASE_FORMING: _ClassVar[Phase]
    PHASE_HEALING: _ClassVar[Phase]
    PHASE_COMPUTING: _ClassVar[Phase]
    PHASE_EXCHANGING: _ClassVar[Phase]
    PHASE_APPLYING: _ClassVar[Phase]
    PHASE_FINISHED: _ClassVar[Phase]
    PHASE_LOADING: _ClassVar[Phase]
POLICY_UNSPECIFIED: Policy
POLICY_REDISTRIBUTE: Policy
POLICY_SHRINK: Policy
POLICY_SPARE: Policy
PHASE_UNSPECIFIED: Phase
PHASE_STARTING: Phase
PHASE_PARKED: Phase
PHASE_FORMING: Phase
PHASE_HEALING: Phase
PHASE_COMPUTING: Phase
PHASE_EXCHANGING: Phase
PHASE_APPLYING: Phase
PHASE_FINISHED: Phase
PHASE_LOADING: Phase

class AgentFrame(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: Report
    def __init__(self, report: _Optional[_Union[Report, _Mapping[str, object]]] = ...) -> None: ...

class LighthouseFrame(_message.Message):
    __slots__ = ("order",)
    ORDER_FIELD_NUMBER: _ClassVar[int]
    order: Order
    def __init__(self, order: _Optional[_Union[Order, _Mapping[str, object]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("group", "incarnation")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    group: int
    incarnation: int
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class QuorumId(_message.Message):
    __slots__ = ("epoch", "number")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Quorum(_message.Message):
    __slots__ = ("id", "members", "addresses", "urgent", "lineage", "reason", "founding")
    ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FOUNDING_FIELD_NUMBER: _ClassVar[int]
    id: QuorumId
    members: _containers.RepeatedCompositeFieldContainer[Member]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    urgent: bool
    lineage: str
    reason: str
    founding: bool
    def __init__(self, id: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping[str, object]]]] = ..., addresses: _Optional[_Iterable[str]] = ..., urgent: bool = ..., lineage: _Optional[str] = ..., reason: _Optional[str] = ..., founding: bool = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("hello", "synced", "heartbeat", "ready", "adopted", "trouble", "finished", "died", "suspected", "present", "saved", "corrupted", "leaving", "prepared")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    CORRUPTED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    synced: Synced
    heartbeat: Heartbeat
    ready: Ready
    adopted: Adopted
    trouble: Trouble
    finished: Finished
    died: Died
    suspected: Suspected
    present: Present
    saved: Saved
    corrupted: Corrupted
    leaving: Leaving
    prepared: Prepared
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping[str, object]]] = ..., synced: _Optional[_Union[Synced, _Mapping[str, object]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping[str, object]]] = ..., ready: _Optional[_Union[Ready, _Mapping[str, object]]] = ..., adopted: _Optional[_Union[Adopted, _Mapping[str, object]]] = ..., trouble: _Optional[_Union[Trouble, _Mapping[str, object]]] = ..., finished: _Optional[_Union[Finished, _Mapping[str, object]]] = ..., died: _Optional[_Union[Died, _Mapping[str, object]]] = ..., suspected: _Optional[_Union[Suspected, _Mapping[str, object]]] = ..., present: _Optional[_Union[Present, _Mapping[str, object]]] = ..., saved: _Optional[_Union[Saved, _Mapping[str, object]]] = ..., corrupted: _Optional[_Union[Corrupted, _Mapping[str, object]]] = ..., leaving: _Optional[_Union[Leaving, _Mapping[str, object]]] = ..., prepared: _Optional[_Union[Prepared, _Mapping[str, object]]] = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("job", "groups", "min_groups", "policy", "ranks", "spare_wait")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MIN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SPARE_WAIT_FIELD_NUMBER: _ClassVar[int]
    job: str
    groups: int
    min_groups: int
    policy: Policy
    ranks: int
    spare_wait: float
    def __init__(self, job: _Optional[str] = ..., groups: _Optional[int] = ..., min_groups: _Optional[int] = ..., policy: _Optional[_Union[Policy, str]] = ..., ranks: _Optional[int] = ..., spare_wait: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("agent", "host", "spec", "fresh", "devices", "closed", "hosted", "epoch", "protocol")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    agent: str
    host: str
    spec: JobSpec
    fresh: bool
    devices: _containers.RepeatedScalarFieldContainer[str]
    closed: _containers.RepeatedScalarFieldContainer[str]
    hosted: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    protocol: int
    def __init__(self, agent: _Optional[str] = ..., host: _Optional[str] = ..., spec: _Optional[_Union[JobSpec, _Mapping[str, object]]] = ..., fresh: bool = ..., devices: _Optional[_Iterable[str]] = ..., closed: _Optional[_Iterable[str]] = ..., hosted: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class Synced(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pulse(_message.Message):
    __slots__ = ("member", "phase", "step", "quorum", "loss", "step_seconds", "pid", "devices", "links", "shards")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    phase: Phase
    step: int
    quorum: QuorumId
    loss: float
    step_seconds: float
    pid: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    links: _containers.RepeatedCompositeFieldContainer[Link]
    shards: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ..., quorum: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ..., loss: _Optional[float] = ..., step_seconds: _Optional[float] = ..., pid: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping[str, object]]]] = ..., shards: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("group", "bits", "round_trip", "lost")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    group: int
    bits: float
    round_trip: float
    lost: float
    def __init__(self, group: _Optional[int] = ..., bits: _Optional[float] = ..., round_trip: _Optional[float] = ..., lost: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("pulses", "warm", "nodes")
    PULSES_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    pulses: _containers.RepeatedCompositeFieldContainer[Pulse]
    warm: int
    nodes: _containers.RepeatedCompositeFieldContainer[HelpingNode]
    def __init__(self, pulses: _Optional[_Iterable[_Union[Pulse, _Mapping[str, object]]]] = ..., warm: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[HelpingNode, _Mapping[str, object]]]] = ...) -> None: ...

class HelpingNode(_message.Message):
    __slots__ = ("number", "name")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Present(_message.Message):
    __slots__ = ("member", "rank", "fingerprint")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    member: Member
    rank: int
    fingerprint: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., rank: _Optional[int] = ..., fingerprint: _Optional[_Iterable[_Union[Fact, _Mapping[str, object]]]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("member", "address", "fingerprint", "initial", "shards", "total_steps", "after", "step", "saves", "looked", "keeps", "kept", "lenient", "damaged")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LENIENT_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    member: Member
    address: str
    fingerprint: _containers.RepeatedCompositeFieldContainer[Fact]
    initial: str
    shards: int
    total_steps: int
    after: QuorumId
    step: int
    saves: bool
    looked: QuorumId
    keeps: bool
    kept: QuorumId
    lenient: bool
    damaged: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., address: _Optional[str] = ..., fingerprint: _Optional[_Iterable[_Union[Fact, _Mapping[str, object]]]] = ..., initial: _Optional[str] = ..., shards: _Optional[int] = ..., total_steps: _Optional[int] = ..., after: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ..., step: _Optional[int] = ..., saves: bool = ..., looked: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ..., keeps: bool = ..., kept: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ..., lenient: bool = ..., damaged: _Optional[int] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("member", "quorum", "step")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    member: Member
    quorum: QuorumId
    step: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., quorum: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ..., step: _Optional[int] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("member", "quorum", "step", "text")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    member: Member
    quorum: QuorumId
    step: int
    text: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., quorum: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ..., step: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("member", "step", "digest")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    member: Member
    step: int
    digest: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., step: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Corrupted(_message.Message):
    __slots__ = ("member", "step", "text", "rank")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    member: Member
    step: int
    text: str
    rank: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., step: _Optional[int] = ..., text: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("member", "step", "seconds", "trouble")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    member: Member
    step: int
    seconds: float
    trouble: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., step: _Optional[int] = ..., seconds: _Optional[float] = ..., trouble: _Optional[str] = ...) -> None: ...

class Died(_message.Message):
    __slots__ = ("member", "cause", "spare", "moved")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    member: Member
    cause: str
    spare: bool
    moved: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., cause: _Optional[str] = ..., spare: bool = ..., moved: bool = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("member",)
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    member: Member
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("member", "trouble")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    member: Member
    trouble: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., trouble: _Optional[str] = ...) -> None: ...

class Suspected(_message.Message):
    __slots__ = ("member", "why")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    member: Member
    why: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., why: _Optional[str] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("welcome", "publish", "refuse", "drain", "kill", "desired", "stop", "resume", "regroup", "cast", "migrate", "stay", "close", "host")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    REGROUP_FIELD_NUMBER: _ClassVar[int]
    CAST_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    publish: Publish
    refuse: Refuse
    drain: DrainMember
    kill: KillGroup
    desired: Desired
    stop: Stop
    resume: Resume
    regroup: Regroup
    cast: Cast
    migrate: Migrate
    stay: Stay
    close: Close
    host: Host
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping[str, object]]] = ..., publish: _Optional[_Union[Publish, _Mapping[str, object]]] = ..., refuse: _Optional[_Union[Refuse, _Mapping[str, object]]] = ..., drain: _Optional[_Union[DrainMember, _Mapping[str, object]]] = ..., kill: _Optional[_Union[KillGroup, _Mapping[str, object]]] = ..., desired: _Optional[_Union[Desired, _Mapping[str, object]]] = ..., stop: _Optional[_Union[Stop, _Mapping[str, object]]] = ..., resume: _Optional[_Union[Resume, _Mapping[str, object]]] = ..., regroup: _Optional[_Union[Regroup, _Mapping[str, object]]] = ..., cast: _Optional[_Union[Cast, _Mapping[str, object]]] = ..., migrate: _Optional[_Union[Migrate, _Mapping[str, object]]] = ..., stay: _Optional[_Union[Stay, _Mapping[str, object]]] = ..., close: _Optional[_Union[Close, _Mapping[str, object]]] = ..., host: _Optional[_Union[Host, _Mapping[str, object]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "protocol", "lives")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LIVES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    protocol: int
    lives: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, epoch: _Optional[int] = ..., protocol: _Optional[int] = ..., lives: _Optional[_Iterable[_Union[Member, _Mapping[str, object]]]] = ...) -> None: ...

class Publish(_message.Message):
    __slots__ = ("member", "quorum")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    member: Member
    quorum: Quorum
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., quorum: _Optional[_Union[Quorum, _Mapping[str, object]]] = ...) -> None: ...

class Refuse(_message.Message):
    __slots__ = ("member", "reason")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    member: Member
    reason: str
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainMember(_message.Message):
    __slots__ = ("member", "moved")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    member: Member
    moved: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., moved: bool = ...) -> None: ...

class KillGroup(_message.Message):
    __slots__ = ("group", "signal", "rank")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    group: int
    signal: int
    rank: int
    def __init__(self, group: _Optional[int] = ..., signal: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class Desired(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: int
    def __init__(self, groups: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("reason", "run")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    run: QuorumId
    def __init__(self, reason: _Optional[str] = ..., run: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ...) -> None: ...

class Migrate(_message.Message):
    __slots__ = ("group", "rank", "drains", "node")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    group: int
    rank: int
    drains: bool
    node: int
    def __init__(self, group: _Optional[int] = ..., rank: _Optional[int] = ..., drains: bool = ..., node: _Optional[int] = ...) -> None: ...

class Host(_message.Message):
    __slots__ = ("member", "joins", "off")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    member: Member
    joins: bool
    off: bool
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., joins: bool = ..., off: bool = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("device", "opens")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    device: str
    opens: bool
    def __init__(self, device: _Optional[str] = ..., opens: bool = ...) -> None: ...

class Stay(_message.Message):
    __slots__ = ("rank", "lost")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    lost: bool
    def __init__(self, rank: _Optional[int] = ..., lost: bool = ...) -> None: ...

class Regroup(_message.Message):
    __slots__ = ("member", "port")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    member: Member
    port: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., port: _Optional[int] = ...) -> None: ...

class Cast(_message.Message):
    __slots__ = ("member", "rank", "environ")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENVIRON_FIELD_NUMBER: _ClassVar[int]
    member: Member
    rank: int
    environ: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., rank: _Optional[int] = ..., environ: _Optional[_Iterable[_Union[Fact, _Mapping[str, object]]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("at", "kind", "text", "group", "data")
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    at: float
    kind: str
    text: str
    group: int
    data: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, at: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., group: _Optional[int] = ..., data: _Optional[_Iterable[_Union[Fact, _Mapping[str, object]]]] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("member", "state", "step", "quorum", "phase", "loss", "step_seconds", "pid", "agent", "connected", "note", "links", "shards")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    state: str
    step: int
    quorum: QuorumId
    phase: Phase
    loss: float
    step_seconds: float
    pid: int
    agent: str
    connected: bool
    note: str
    links: _containers.RepeatedCompositeFieldContainer[Link]
    shards: int
    def __init__(self, member: _Optional[_Union[Member, _Mapping[str, object]]] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., quorum: _Optional[_Union[QuorumId, _Mapping[str, object]]] = ..., phase: _Optional[_Union[Phase, str]] = ..., loss: _Optional[float] = ..., step_seconds: _Optional[float] = ..., pid: _Optional[int] = ..., agent: _Optional[str] = ..., connected: bool = ..., note: _Optional[str] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping[str, object]]]] = ..., shards: _Optional[int] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "epoch", "quorum", "planned", "desired", "groups", "events", "complete", "drained", "scaled")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    SCALED_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    quorum: Quorum
    planned: Quorum
    desired: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    complete: bool
    drained: _containers.RepeatedScalarFieldContainer[str]
    scaled: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., quorum: _Optional[_Union[Quorum, _Mapping[str, object]]] = ..., planned: _Optional[_Union[Quorum, _Mapping[str, object]]] = ..., desired: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping[str, object]]]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping[str, object]]]] = ..., complete: bool = ..., drained: _Optional[_Iterable[str]] = ..., scaled: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("jobs", "leads", "leader", "epoch", "trouble")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    leads: bool
    leader: str
    epoch: int
    trouble: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping[str, object]]]] = ..., leads: bool = ..., leader: _Optional[str] = ..., epoch: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class KillRequest(_message.Message):
    __slots__ = ("job", "group", "signal", "rank")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    job: str
    group: int
    signal: int
    rank: int
    def __init__(self, job: _Optional[str] = ..., group: _Optional[int] = ..., signal: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("job", "group", "rank", "reason", "share", "drains", "to", "whole")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    job: str
    group: int
    rank: int
    reason: str
    share: float
    drains: bool
    to: str
    whole: bool
    def __init__(self, job: _Optional[str] = ..., group: _Optional[int] = ..., rank: _Optional[int] = ..., reason: _Optional[str] = ..., share: _Optional[float] = ..., drains: bool = ..., to: _Optional[str] = ..., whole: bool = ...) -> None: ...

class NodeRequest(_message.Message):
    __slots__ = ("job", "node", "device", "undrain")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    job: str
    node: str
    device: str
    undrain: bool
    def __init__(self, job: _Optional[str] = ..., node: _Optional[str] = ..., device: _Optional[str] = ..., undrain: bool = ...) -> None: ...

class GroupRequest(_message.Message):
    __slots__ = ("job", "group", "reason", "share")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    job: str
    group: int
    reason: str
    share: float
    def __init__(self, job: _Optional[str] = ..., group: _Optional[int] = ..., reason: _Optional[str] = ..., share: _Optional[float] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("job", "groups")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    job: str
    groups: int
    def __init__(self, job: _Optional[str] = ..., groups: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...
