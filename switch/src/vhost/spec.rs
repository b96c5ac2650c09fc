//! Numbers of virtio 1.2 and of QEMU's `vhost-user.rst`.

/// Bits of the device's features.
pub(crate) mod feature {
    /// The device sums for the guest; the guest takes frames without sums.
    pub(crate) const CSUM: u64 = 1 << 0;
    pub(crate) const GUEST_CSUM: u64 = 1 << 1;
    pub(crate) const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    pub(crate) const MAC: u64 = 1 << 5;
    pub(crate) const GUEST_TSO4: u64 = 1 << 7;
    pub(crate) const GUEST_TSO6: u64 = 1 << 8;
    pub(crate) const GUEST_ECN: u64 = 1 << 9;
    pub(crate) const HOST_TSO4: u64 = 1 << 11;
    pub(crate) const HOST_TSO6: u64 = 1 << 12;
    pub(crate) const HOST_ECN: u64 = 1 << 13;
    pub(crate) const MRG_RXBUF: u64 = 1 << 15;
    pub(crate) const STATUS: u64 = 1 << 16;
    pub(crate) const CTRL_VQ: u64 = 1 << 17;
    pub(crate) const CTRL_RX: u64 = 1 << 18;
    pub(crate) const MQ: u64 = 1 << 22;
    pub(crate) const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// What the back-end writes is logged (`VHOST_F_LOG_ALL`).
    pub(crate) const LOG_ALL: u64 = 1 << 26;
    pub(crate) const INDIRECT_DESC: u64 = 1 << 28;
    pub(crate) const EVENT_IDX: u64 = 1 << 29;
    /// `VHOST_USER_F_PROTOCOL_FEATURES`.
    pub(crate) const PROTOCOL: u64 = 1 << 30;
    pub(crate) const VERSION_1: u64 = 1 << 32;
    pub(crate) const IN_ORDER: u64 = 1 << 35;
    pub(crate) const GUEST_USO4: u64 = 1 << 54;
    pub(crate) const GUEST_USO6: u64 = 1 << 55;
    pub(crate) const HOST_USO: u64 = 1 << 56;

    /// What a guest lets the device leave to it.
    pub(crate) const GUEST_OFFLOADS: u64 =
        GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_USO4 | GUEST_USO6;

    /// What the device lets a guest leave to it.
    pub(crate) const HOST_TSO: u64 = HOST_TSO4 | HOST_TSO6 | HOST_ECN | HOST_USO;

    /// All that we offer.
    pub(crate) const OFFERED: u64 = CSUM
        | GUEST_OFFLOADS
        | HOST_TSO
        | CTRL_GUEST_OFFLOADS
        | MAC
        | MRG_RXBUF
        | STATUS
        | CTRL_VQ
        | CTRL_RX
        | CTRL_MAC_ADDR
        | MQ
        | LOG_ALL
        | INDIRECT_DESC
        | EVENT_IDX
        | PROTOCOL
        | VERSION_1
        | IN_ORDER;
}

/// Bits of the protocol's features. NB: never INBAND_NOTIFICATIONS (14): User-mode Linux prefers it, and
/// then each kick is a message.
pub(crate) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const LOG_SHMFD: u64 = 1 << 1;
    pub(crate) const RARP: u64 = 1 << 2;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const MTU: u64 = 1 << 4;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
    pub(crate) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// All that we offer.
    pub(crate) const OFFERED: u64 = MQ
        | LOG_SHMFD
        | RARP
        | REPLY_ACK
        | MTU
        | BACKEND_REQ
        | CONFIG
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS;
}

/// Requests of a front-end.
pub(crate) mod request {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const RESET_OWNER: u32 = 4;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_LOG_BASE: u32 = 6;
    pub(crate) const SET_LOG_FD: u32 = 7;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SEND_RARP: u32 = 19;
    pub(crate) const NET_SET_MTU: u32 = 20;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const SET_CONFIG: u32 = 25;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
}

/// The control queue (virtio 1.2, 5.1.6.5).
pub(crate) mod control {
    pub(crate) const RX: u8 = 0;
    pub(crate) const MAC: u8 = 1;
    pub(crate) const MQ: u8 = 4;
    pub(crate) const GUEST_OFFLOADS: u8 = 5;
    /// Answers.
    pub(crate) const OK: u8 = 0;
    pub(crate) const ERR: u8 = 1;
}

/// Pairs of rings that are served; the control queue comes beside them.
pub(crate) const MAX_PAIRS: usize = 16;
/// Rings in all.
pub(crate) const MAX_RINGS: usize = 2 * MAX_PAIRS + 1;
/// Entries of a ring (virtio 1.2, 2.7).
pub(crate) const MAX_SIZE: u32 = 32_768;
