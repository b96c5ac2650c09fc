//! Interfaces: facts that the kernel has by name (netdevice(7), ethtool, getifaddrs(3)).
#![expect(
    unsafe_code,
    reason = "interface requests and lists of the C library have no safe wrapper"
)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_ulong};
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::null_mut;

/// Facts about an interface, asked of the kernel by name.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// Its number, `ifindex`.
    pub index: i32,
    /// `ARPHRD_*`.
    pub hardware: u16,
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Bytes after the Ethernet header.
    pub mtu: u32,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// Has a carrier (`IFF_RUNNING`).
    pub running: bool,
}

/// Asks about an interface by name, through any socket of the network namespace in question.
///
/// # Errors
/// `ENODEV` if no interface has that name.
pub fn link(socket: impl AsFd, name: &str) -> io::Result<Link> {
    let ask = |what: c_ulong| -> io::Result<libc::ifreq> {
        let mut request = named(name)?;
        // SAFETY: these requests read the name and write one member of the `ifreq`.
        check(unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), what as _, &raw mut request) })?;
        Ok(request)
    };
    let hardware = ask(libc::SIOCGIFHWADDR as c_ulong)?;
    let (flags, mtu) = (
        ask(libc::SIOCGIFFLAGS as c_ulong)?,
        ask(libc::SIOCGIFMTU as c_ulong)?,
    );
    let index = rustix::net::netdevice::name_to_index(&socket, name)?;
    // SAFETY: every member of the union is plain data, and each request wrote the one read here.
    let (address, flags, mtu) = unsafe {
        (
            hardware.ifr_ifru.ifru_hwaddr,
            c_int::from(flags.ifr_ifru.ifru_flags),
            mtu.ifr_ifru.ifru_mtu,
        )
    };
    Ok(Link {
        index: index as i32,
        hardware: address.sa_family,
        mac: std::array::from_fn(|i| address.sa_data[i] as u8),
        mtu: mtu.max(0) as u32,
        up: flags & libc::IFF_UP != 0,
        running: flags & libc::IFF_RUNNING != 0,
    })
}

/// Bytes that an interface of this number takes after the Ethernet header, asked as [`link`] asks.
///
/// # Errors
/// `ENODEV` if there is none.
pub fn mtu(socket: impl AsFd, index: i32) -> io::Result<u32> {
    let name = rustix::net::netdevice::index_to_name(&socket, index as u32)?;
    let mut request = named(&name)?;
    let what = libc::SIOCGIFMTU as c_ulong;
    // SAFETY: the request reads the name and writes the MTU, which is plain data.
    let mtu = unsafe {
        let done = libc::ioctl(socket.as_fd().as_raw_fd(), what as _, &raw mut request);
        check(done)?;
        request.ifr_ifru.ifru_mtu
    };
    Ok(mtu.max(0) as u32)
}

/// The names of this network namespace's interfaces.
pub fn names() -> io::Result<Vec<String>> {
    // SAFETY: no arguments; the list is freed below.
    let list = unsafe { libc::if_nameindex() };
    if list.is_null() {
        return Err(io::Error::last_os_error());
    }
    let mut names = Vec::new();
    let mut entry = list;
    // SAFETY: the list ends with an entry whose index is 0 and whose name is null; every entry
    // before it has a NUL-terminated name; it is freed once and not used afterwards.
    unsafe {
        while (*entry).if_index != 0 && !(*entry).if_name.is_null() {
            names.push(
                CStr::from_ptr((*entry).if_name)
                    .to_string_lossy()
                    .into_owned(),
            );
            entry = entry.add(1);
        }
        libc::if_freenameindex(list);
    }
    Ok(names)
}

/// Megabits per second of an interface; `None` where the driver does not say or there is no link.
pub fn speed_mbps(socket: impl AsFd, name: &str) -> Option<u32> {
    let settings = EthtoolCmd {
        cmd: ETHTOOL_GSET,
        ..EthtoolCmd::default()
    };
    let settings = ethtool(socket, name, settings)?;
    let speed = u32::from(settings.speed_hi) << 16 | u32::from(settings.speed);
    // SPEED_UNKNOWN is -1; old drivers say 65535.
    (speed != u32::MAX && speed != 0xffff).then_some(speed)
}

/// How many receive queues an interface has now; `None` where the driver does not say.
pub fn receive_queues(socket: impl AsFd, name: &str) -> Option<u32> {
    let channels = EthtoolChannels {
        cmd: ETHTOOL_GCHANNELS,
        ..EthtoolChannels::default()
    };
    let channels = ethtool(socket, name, channels)?;
    let count = channels.rx_count + channels.combined_count;
    (count > 0).then_some(count)
}

/// Whether an interface takes VLAN tags out of the frames that it receives.
pub fn strips_vlan_tags(socket: impl AsFd, name: &str) -> bool {
    const ETH_FLAG_RXVLAN: u32 = 1 << 8;
    value(socket, name, ETHTOOL_GFLAGS).is_some_and(|flags| flags & ETH_FLAG_RXVLAN != 0)
}

/// Whether the kernel merges packets that an interface receives (GRO); `None` where it does not say.
pub fn merges(socket: impl AsFd, name: &str) -> Option<bool> {
    value(socket, name, ETHTOOL_GGRO).map(|is_on| is_on != 0)
}

/// Whether an interface merges packets itself and keeps no trace of it (LRO).
pub fn merges_in_hardware(socket: impl AsFd, name: &str) -> bool {
    const ETH_FLAG_LRO: u32 = 1 << 15;
    value(socket, name, ETHTOOL_GFLAGS).is_some_and(|flags| flags & ETH_FLAG_LRO != 0)
}

/// How many places an interface's receive ring has, and how many it may have; `None` where there is none.
pub fn receive_slots(socket: impl AsFd, name: &str) -> Option<(u32, u32)> {
    let rings = EthtoolRings {
        cmd: ETHTOOL_GRINGPARAM,
        ..EthtoolRings::default()
    };
    let rings = ethtool(socket, name, rings)?;
    (rings.rx_max > 0).then_some((rings.rx, rings.rx_max))
}

/// How an interface chooses the receive queue of a packet (RSS).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spreading {
    /// The key of its hash function.
    pub key: Vec<u8>,
    /// Its hash function: 1 Toeplitz, 2 XOR, 4 CRC-32.
    pub function: u8,
    /// What is done with the fields before they are hashed; not 0: sender and receiver are combined.
    pub transform: u8,
}

/// How an interface spreads what it receives; `None` where the driver does not say.
pub fn spreading(socket: impl AsFd, name: &str) -> Option<Spreading> {
    let mut question = EthtoolRxfh {
        cmd: ETHTOOL_GRSSH,
        ..EthtoolRxfh::default()
    };
    // Sizes of zero: the driver fills in its own.
    question.key_size = ethtool(&socket, name, question)?.key_size;
    question.indirection_size = 0;
    let len = question.key_size as usize;
    if len > KEY_MAX {
        return None;
    }
    let answer = ethtool(socket, name, question)?;
    Some(Spreading {
        key: answer.key.as_flattened()[..len].to_vec(),
        function: answer.function,
        transform: answer.transform,
    })
}

/// The fields that an interface hashes for TCP over IPv4, as [`FIELD_SOURCE`] and the others; `None` where
/// the driver does not say.
pub fn hashed_fields(socket: impl AsFd, name: &str) -> Option<u64> {
    const TCP_V4_FLOW: u32 = 1;
    let question = EthtoolRxnfc {
        cmd: ETHTOOL_GRXFH,
        flow_type: TCP_V4_FLOW,
        ..EthtoolRxnfc::default()
    };
    Some(ethtool(socket, name, question)?.data)
}

/// The sender's address is hashed (`RXH_IP_SRC`).
pub const FIELD_SOURCE: u64 = 1 << 4;
/// The receiver's address is hashed (`RXH_IP_DST`).
pub const FIELD_DESTINATION: u64 = 1 << 5;
/// The sender's port is hashed (`RXH_L4_B_0_1`).
pub const FIELD_SOURCE_PORT: u64 = 1 << 6;
/// The receiver's port is hashed (`RXH_L4_B_2_3`).
pub const FIELD_DESTINATION_PORT: u64 = 1 << 7;

/// The answer to a question that is one number.
fn value(socket: impl AsFd, name: &str, cmd: u32) -> Option<u32> {
    Some(ethtool(socket, name, EthtoolValue { cmd, data: 0 })?.data)
}

/// Asks the driver; `None` if it cannot say.
fn ethtool<T: Question>(socket: impl AsFd, name: &str, mut question: T) -> Option<T> {
    let mut request = named(name).ok()?;
    request.ifr_ifru.ifru_data = (&raw mut question).cast();
    // SAFETY: SIOCETHTOOL reads and writes the structure of the command, which `Question` says `T`
    // is, and which outlives the call.
    check(unsafe {
        libc::ioctl(
            socket.as_fd().as_raw_fd(),
            libc::SIOCETHTOOL as _,
            &raw mut request,
        )
    })
    .ok()?;
    Some(question)
}

/// A structure of linux/ethtool.h.
///
/// # Safety
/// Begins with the command, which is one that reads and writes no more than the structure.
unsafe trait Question {}
// SAFETY: of ETHTOOL_GSET.
unsafe impl Question for EthtoolCmd {}
// SAFETY: of ETHTOOL_GCHANNELS.
unsafe impl Question for EthtoolChannels {}
// SAFETY: of ETHTOOL_GRINGPARAM.
unsafe impl Question for EthtoolRings {}
// SAFETY: of ETHTOOL_GFLAGS and ETHTOOL_GGRO.
unsafe impl Question for EthtoolValue {}
// SAFETY: of ETHTOOL_GRSSH: the kernel writes the key of the size that was asked for, at most `KEY_MAX`, and no
// table of a size of zero.
unsafe impl Question for EthtoolRxfh {}
// SAFETY: of ETHTOOL_GRXFH: the kernel reads and writes at most a `struct ethtool_rxnfc`, 192 bytes.
unsafe impl Question for EthtoolRxnfc {}

/// The IP addresses of every interface of the calling thread's network namespace, as
/// `192.0.2.1/24`, by the interface's name.
pub fn addresses() -> io::Result<BTreeMap<String, Vec<String>>> {
    let mut list = null_mut();
    // SAFETY: writes one pointer; the list is freed below.
    check(unsafe { libc::getifaddrs(&raw mut list) })?;
    let mut found = BTreeMap::<String, Vec<String>>::new();
    let mut entry = list;
    // SAFETY: every entry has a NUL-terminated name; `ip` takes null pointers and looks at the
    // family first; the list is freed once and not used afterwards.
    unsafe {
        while let Some(one) = entry.as_ref() {
            if let (Some(address), Some(mask)) = (ip(one.ifa_addr), ip(one.ifa_netmask)) {
                let name = CStr::from_ptr(one.ifa_name).to_string_lossy();
                // An IPv4 address may come under its label, `eth0:1`.
                let name = name.split(':').next().unwrap_or_default();
                let text = format!("{address}/{}", ones(mask));
                found.entry(name.to_owned()).or_default().push(text);
            }
            entry = one.ifa_next;
        }
        libc::freeifaddrs(list);
    }
    Ok(found)
}

/// # Safety
/// `address` is null or a socket address of the family that it says.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: not null by `as_ref`; the family says which structure is there.
    unsafe {
        match c_int::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

fn ones(mask: IpAddr) -> u32 {
    match mask {
        IpAddr::V4(mask) => mask.to_bits().count_ones(),
        IpAddr::V6(mask) => mask.to_bits().count_ones(),
    }
}

/// `struct ethtool_cmd` of linux/ethtool.h.
#[repr(C)]
#[derive(Default)]
struct EthtoolCmd {
    cmd: u32,
    supported: u32,
    advertising: u32,
    speed: u16,
    duplex: u8,
    port: u8,
    phy_address: u8,
    transceiver: u8,
    autoneg: u8,
    mdio_support: u8,
    maxtxpkt: u32,
    maxrxpkt: u32,
    speed_hi: u16,
    eth_tp_mdix: u8,
    eth_tp_mdix_ctrl: u8,
    lp_advertising: u32,
    reserved: [u32; 2],
}

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct EthtoolChannels {
    cmd: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx_count: u32,
    tx_count: u32,
    other_count: u32,
    combined_count: u32,
}

/// `struct ethtool_ringparam`.
#[repr(C)]
#[derive(Default)]
struct EthtoolRings {
    cmd: u32,
    rx_max: u32,
    rx_mini_max: u32,
    rx_jumbo_max: u32,
    tx_max: u32,
    rx: u32,
    rx_mini: u32,
    rx_jumbo: u32,
    tx: u32,
}

/// `struct ethtool_value`.
#[repr(C)]
struct EthtoolValue {
    cmd: u32,
    data: u32,
}

/// `struct ethtool_rxfh`, without a table, and with room for a key.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct EthtoolRxfh {
    cmd: u32,
    context: u32,
    indirection_size: u32,
    key_size: u32,
    function: u8,
    transform: u8,
    reserved: [u8; 6],
    key: [[u8; 16]; KEY_MAX / 16],
}

/// `struct ethtool_rxnfc`, as far as it is read; the rest is the kernel's.
#[repr(C)]
#[derive(Default)]
struct EthtoolRxnfc {
    cmd: u32,
    flow_type: u32,
    data: u64,
    rest: [u64; 24],
}

/// Drivers have keys of 40 and 52 bytes.
const KEY_MAX: usize = 256;
const ETHTOOL_GSET: u32 = 1;
const ETHTOOL_GRINGPARAM: u32 = 0x10;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_GRXFH: u32 = 0x29;
const ETHTOOL_GGRO: u32 = 0x2b;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETHTOOL_GRSSH: u32 = 0x46;

/// A request about the interface of this name.
pub fn named(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an `ifreq` of zeros is one with an empty name and a null pointer.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    // One byte stays zero, the end of the name.
    if name.is_empty() || name.len() >= request.ifr_name.len() || name.contains('\0') {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
    Ok(request)
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
