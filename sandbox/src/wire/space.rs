//! A network namespace of the program's own, made without privileges: a child makes it, sets it up, and hands its
//! descriptors over. Then it makes sockets there for the supervisor, until that ends.
//!
//! An ordinary user makes a user namespace with it, in which this user is itself and nobody else is anybody: the
//! child may then configure the network, and the program, which is executed there, may not. Root makes the network
//! namespace alone, and its programs keep what root may do.

#![expect(unsafe_code, reason = "fork has no safe interface")]

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::WireError;
use super::netlink::Netlink;
use crate::interface::{Tap, TapPlan};

/// What the namespace is to have.
#[derive(Clone, Debug)]
pub(super) struct SpacePlan {
    /// None: no way out.
    pub(super) tap: Option<TapWish>,
    /// Nameservers that the program asks: the loopback interface has these addresses.
    pub(super) nameservers: Vec<IpAddr>,
}

/// What its interface is to be like.
#[derive(Clone, Debug)]
pub(super) struct TapWish {
    pub(super) mtu: u16,
    pub(super) mac: [u8; 6],
    pub(super) addresses: Vec<(IpAddr, u8)>,
    pub(super) router: Option<IpAddr>,
}

/// The namespace, which lives as long as this or a program in it, and what we have of it.
#[derive(Debug)]
pub(super) struct Space {
    user: Option<OwnedFd>,
    net: OwnedFd,
    pub(super) tap: Option<Tap>,
    /// Asks the namespace's kernel.
    pub(super) netlink: Option<Netlink>,
    /// Sockets on the addresses of the nameservers.
    pub(super) questions: Vec<(UdpSocket, TcpListener)>,
    pub(super) maker: Arc<Maker>,
}

/// Makes sockets in the namespace.
#[derive(Debug)]
pub(super) struct Maker {
    /// To the child there.
    channel: Mutex<OwnedFd>,
    /// The child: somebody else may have waited for it, and its number may be another's.
    child: OwnedFd,
}

impl Space {
    /// Makes it. The process has one thread as yet: its child does more than threads allow it.
    pub(super) fn new(plan: &SpacePlan) -> Result<Self, WireError> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(WireError::system("make a pair of sockets"))?;
        // SAFETY: the child is this process again, with its one thread; it ends in `_exit` below.
        let pid = match unsafe { libc::fork() } {
            -1 => return Err(WireError::system("fork")(io::Error::last_os_error())),
            0 => {
                drop(ours);
                let serve = || tell(&theirs, make(plan)).and_then(|()| make_sockets(&theirs));
                let said = std::panic::catch_unwind(serve);
                // SAFETY: ends the child, which has nothing to clean up that is its own.
                unsafe { libc::_exit(i32::from(!matches!(said, Ok(Ok(()))))) }
            }
            pid => pid,
        };
        drop(theirs);
        // From here on its end is waited for, however this ends.
        let heard = hear(&ours);
        let child = Pid::from_raw(pid).ok_or_else(|| WireError::new("a child without a number"))?;
        let child = rustix::process::pidfd_open(child, PidfdFlags::empty());
        let maker = Arc::new(Maker {
            channel: Mutex::new(ours),
            child: child.map_err(WireError::system("hold a child"))?,
        });
        let (text, fds) = heard.map_err(WireError::system("hear of the network namespace"))?;
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(|| WireError::new(&text));
        let net = next()?;
        let user = match rustix::process::geteuid().is_root() {
            true => None,
            false => Some(next()?),
        };
        let tap = match &plan.tap {
            None => None,
            Some(_) => Some(Tap::of(&text, next()?)),
        };
        let netlink = Some(Netlink::of(next()?));
        let mut questions = Vec::new();
        for _ in &plan.nameservers {
            questions.push((next()?.into(), next()?.into()));
        }
        Ok(Self {
            user,
            net,
            tap,
            netlink,
            questions,
            maker,
        })
    }

    /// What a child calls before it executes the program: two system calls, and no more.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn enter(&self) -> io::Result<()> {
        if let Some(user) = &self.user {
            move_into_link_name_space(user.as_fd(), Some(LinkNameSpaceType::User))?;
        }
        move_into_link_name_space(self.net.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(())
    }
}

impl Maker {
    /// A socket of the namespace.
    pub(super) fn socket(&self, family: AddressFamily, kind: SocketType) -> io::Result<OwnedFd> {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let wish = [
            u8::from(family == AddressFamily::INET6),
            u8::from(kind == SocketType::STREAM),
        ];
        rustix::net::send(&*channel, &wish, SendFlags::NOSIGNAL)?;
        let (_, fds) = hear(&channel)?;
        fds.into_iter()
            .next()
            .ok_or_else(|| io::ErrorKind::Other.into())
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        // It has nothing to lose, and ends at once.
        let _ = rustix::process::pidfd_send_signal(&self.child, Signal::KILL);
        let _ = rustix::process::waitid(WaitId::PidFd(self.child.as_fd()), WaitIdOptions::EXITED);
    }
}

/// What the child does until the supervisor ends: a socket for each wish.
fn make_sockets(channel: &OwnedFd) -> io::Result<()> {
    let mut wish = [0; 2];
    while rustix::net::recv(channel, &mut wish, RecvFlags::empty())?.0 == wish.len() {
        let family = match wish[0] {
            0 => AddressFamily::INET,
            _ => AddressFamily::INET6,
        };
        let kind = match wish[1] {
            0 => SocketType::DGRAM,
            _ => SocketType::STREAM,
        };
        let made = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
        let fds = made.into_iter().collect();
        let name = String::new();
        tell(channel, Ok(Made { name, fds }))?;
    }
    Ok(())
}

/// What the child has to hand over: the interface's name, and descriptors in the order of [`Space::new`].
struct Made {
    name: String,
    fds: Vec<OwnedFd>,
}

fn make(plan: &SpacePlan) -> Result<Made, WireError> {
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let mut fds = Vec::new();
    unshare()?;
    let open = |kind: &str| {
        let file = fs::File::open(format!("/proc/self/ns/{kind}"));
        file.map(OwnedFd::from)
            .map_err(WireError::system("open the namespace"))
    };
    fds.push(open("net")?);
    if !rustix::process::geteuid().is_root() {
        fds.push(open("user")?);
    }
    let configure = WireError::system("configure the network namespace");
    let netlink = Netlink::new().map_err(&configure)?;
    let lo = netlink.index("lo").map_err(&configure)?;
    netlink.up(lo).map_err(&configure)?;
    // `ping` by datagram sockets, as most hosts let everybody; a kernel that does not is none the worse.
    let group = rustix::process::getegid().as_raw();
    let _ = fs::write(PING_GROUPS, format!("{group} {group}"));
    for nameserver in plan
        .nameservers
        .iter()
        .filter(|address| !address.is_loopback())
    {
        let bits = if nameserver.is_ipv4() { 32 } else { 128 };
        netlink.address(lo, *nameserver, bits).map_err(&configure)?;
    }
    let mut name = String::new();
    if let Some(wish) = &plan.tap {
        let tap = Tap::new(&TapPlan {
            name: INTERFACE,
            queues: 1,
            mtu: wish.mtu,
            mac: Some(wish.mac),
            up: true,
            silent: false,
            merged: true,
        });
        let tap = tap.map_err(|error| WireError::new(&error.to_string()))?;
        let index = netlink.index(tap.name()).map_err(&configure)?;
        for (address, bits) in &wish.addresses {
            let given = netlink.address(index, *address, *bits);
            given.map_err(WireError::system(&format!(
                "have the address {address}/{bits}"
            )))?;
        }
        if let Some(router) = wish.router {
            let route = netlink.default_route(index, router);
            route.map_err(WireError::system(&format!("reach the gateway {router}")))?;
        }
        tap.name().clone_into(&mut name);
        fds.extend(tap.into_queues());
    }
    fds.push(netlink.into_socket());
    for nameserver in &plan.nameservers {
        let bind = WireError::system(&format!("answer as the nameserver {nameserver}"));
        let at = SocketAddr::new(*nameserver, DNS);
        fds.push(UdpSocket::bind(at).map_err(&bind)?.into());
        fds.push(TcpListener::bind(at).map_err(&bind)?.into());
    }
    Ok(Made { name, fds })
}

/// Leaves the network that the host has.
fn unshare() -> Result<(), WireError> {
    let network = UnshareFlags::NEWNET;
    let [user, group] = [
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    ];
    if user == 0 {
        // SAFETY: the child has no thread with whom it would share descriptors or a working directory.
        return unsafe { rustix::thread::unshare_unsafe(network) }
            .map_err(WireError::system("make a network namespace"));
    }
    // The files of a process that is not dumpable are root's; the supervisor may be none.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    // SAFETY: as above.
    let unshared = unsafe { rustix::thread::unshare_unsafe(network | UnshareFlags::NEWUSER) };
    unshared.map_err(WireError::closed)?;
    let map = |file: &str, text: &str| {
        let written = fs::write(format!("/proc/self/{file}"), text);
        written.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => WireError::closed(rustix::io::Errno::PERM),
            _ => WireError::system(&format!("write {file}"))(error),
        })
    };
    map("setgroups", "deny")?;
    map("uid_map", &format!("{user} {user} 1"))?;
    map("gid_map", &format!("{group} {group} 1"))?;
    // A change of rights may have taken it back.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    Ok(())
}

fn tell(to: &OwnedFd, made: Result<Made, WireError>) -> io::Result<()> {
    let (text, fds) = match made {
        Ok(made) => (made.name, made.fds),
        Err(error) => (error.to_string(), Vec::new()),
    };
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // NB: an empty message would be no message.
    let text = format!("{text}\n");
    rustix::net::sendmsg(
        to,
        &[IoSlice::new(text.as_bytes())],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn hear(from: &OwnedFd) -> io::Result<(String, Vec<OwnedFd>)> {
    let mut text = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let heard = loop {
        match rustix::net::recvmsg(
            from,
            &mut [IoSliceMut::new(&mut text)],
            &mut ancillary,
            flags,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            heard => break heard?,
        }
    };
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    match heard.bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => Ok((
            String::from_utf8_lossy(&text[..count]).trim().to_owned(),
            fds,
        )),
    }
}

/// Groups that may make datagram sockets of ICMP; in a new namespace none.
const PING_GROUPS: &str = "/proc/sys/net/ipv4/ping_group_range";
/// The interface's name in the namespace.
const INTERFACE: &str = "eth0";
const DNS: u16 = 53;
/// Two namespaces, an interface, netlink, nameservers: `resolv.conf` has three.
const MOST_FDS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_is_left_stays_as_long_as_its_namespace() {
        for is_left in [false, true] {
            let mut space = Space::new(&SpacePlan {
                tap: Some(TapWish {
                    mtu: 1500,
                    mac: [2, 0, 0, 0, 0, 9],
                    addresses: Vec::new(),
                    router: None,
                }),
                nameservers: Vec::new(),
            })
            .unwrap();
            let tap = space.tap.take().unwrap();
            let name = tap.name().to_owned();
            if is_left {
                tap.leave();
            }
            drop(tap);
            let netlink = space.netlink.take().unwrap();
            if is_left {
                // As long as it takes to be removed.
                std::thread::sleep(std::time::Duration::from_millis(200));
                assert!(netlink.index(&name).is_ok());
            } else {
                vnplug_testing::eventually("it is removed", || netlink.index(&name).is_err());
            }
        }
    }

    #[test]
    fn the_kernel_of_the_namespace_says_which_addresses_its_interface_has() {
        let own: IpAddr = "fd00::9".parse().unwrap();
        let space = Space::new(&SpacePlan {
            tap: Some(TapWish {
                mtu: 1500,
                mac: [2, 0, 0, 0, 0, 9],
                addresses: vec![(own, 64)],
                router: None,
            }),
            nameservers: Vec::new(),
        });
        let space = space.unwrap();
        let (netlink, tap) = (space.netlink.unwrap(), space.tap.unwrap());
        let index = netlink.index(tap.name()).unwrap();
        let made = |addresses: &[IpAddr]| {
            let is_local = |address: &&IpAddr| matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
            addresses.iter().filter(is_local).count()
        };
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        loop {
            let addresses = netlink.addresses6(index).unwrap();
            assert!(addresses.contains(&own), "{addresses:?}");
            // The kernel makes one.
            if made(&addresses) == 1 && addresses.len() == 2 {
                break;
            }
            assert!(std::time::Instant::now() < until, "{addresses:?}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}
