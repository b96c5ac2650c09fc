//! Which interfaces a network namespace has, kept up to date by what the kernel tells of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

use crate::netlink::{
    self, GROUP_LINK, IFINFO, Message, NLM_F_DUMP, NLM_F_DUMP_INTR, NLMSG_DONE, NLMSG_ERROR,
    RTM_DELLINK, RTM_NEWLINK,
};

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// Its name now.
    pub name: String,
    /// `ARPHRD_*`.
    pub hardware: u16,
}

/// The interfaces of the network namespace in which this was made. Whoever polls the descriptor and [reads](Self::read) has
/// them as they are.
#[derive(Debug)]
pub struct Links {
    socket: OwnedFd,
    /// By number.
    all: BTreeMap<i32, Known>,
    /// Those that a list on its way has named so far.
    listed: Option<BTreeSet<i32>>,
    /// The list on its way is old, and another one is to be asked for.
    again: bool,
    /// News were lost.
    lost: bool,
    buffer: Vec<u8>,
}

impl Links {
    /// Listens in the calling thread's network namespace, and asks which there are; needs no privilege.
    ///
    /// # Errors
    /// The system's.
    pub fn watch() -> io::Result<Self> {
        let socket = netlink::open(SocketFlags::NONBLOCK)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, GROUP_LINK))?;
        let mut links = Self {
            socket,
            all: BTreeMap::new(),
            listed: None,
            again: false,
            lost: false,
            buffer: vec![0; 64 << 10],
        };
        links.ask()?;
        Ok(links)
    }

    /// The interfaces, by number. While a list is on its way they may be old.
    pub fn all(&self) -> &BTreeMap<i32, Known> {
        &self.all
    }

    /// Takes what the kernel told, as much as is there. Whether they are now known as they are.
    ///
    /// # Errors
    /// The system's; what is not told because it is too much is asked for again.
    pub fn read(&mut self) -> io::Result<bool> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let read = self.take(&mut buffer);
        self.buffer = buffer;
        read.map(|()| self.listed.is_none() && !self.lost)
    }

    fn take(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        // Bounded: interfaces may change as fast as they are heard of.
        for _ in 0..MOST_NEWS {
            match rustix::net::recvfrom(&self.socket, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((len, _, from)) => {
                    let from = from.and_then(|it| SocketAddrNetlink::try_from(it).ok());
                    // Others than the kernel may send, too.
                    if from.is_some_and(|it| it.pid() == 0) {
                        self.hear(&buffer[..len])?;
                    }
                }
                // NB: only now. Until its queue was empty the kernel says no second time that it dropped news, of those
                // after the list too.
                Err(Errno::AGAIN) => {
                    return match std::mem::take(&mut self.lost) {
                        true => self.ask(),
                        false => Ok(()),
                    };
                }
                // Much changed at once: what was not told is asked for.
                Err(Errno::NOBUFS) => self.lost = true,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Asks which there are; now, or when the list on its way is over.
    fn ask(&mut self) -> io::Result<()> {
        if self.listed.is_some() {
            self.again = true;
            return Ok(());
        }
        let request = netlink::link_request(NLM_F_DUMP, 0, &WITHOUT_COUNTERS);
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&self.socket, &request, SendFlags::empty(), &kernel)?;
        self.listed = Some(BTreeSet::new());
        Ok(())
    }

    fn hear(&mut self, datagram: &[u8]) -> io::Result<()> {
        for message in netlink::messages(datagram) {
            self.again |= message.flags & NLM_F_DUMP_INTR != 0;
            match message.kind {
                RTM_NEWLINK | RTM_DELLINK => self.note(message),
                NLMSG_DONE | NLMSG_ERROR => {
                    // What was not named is no more.
                    if let Some(listed) = self.listed.take()
                        && message.kind == NLMSG_DONE
                    {
                        self.all.retain(|index, _| listed.contains(index));
                    }
                    self.again |= message.kind == NLMSG_ERROR;
                    if std::mem::take(&mut self.again) {
                        self.ask()?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn note(&mut self, message: Message<'_>) {
        let Some((index, known)) = interface(message.body) else {
            return;
        };
        match message.kind {
            RTM_NEWLINK => {
                self.all.insert(index, known);
                self.listed.as_mut().map(|listed| listed.insert(index));
            }
            _ => {
                self.all.remove(&index);
                self.listed.as_mut().map(|listed| listed.remove(&index));
            }
        }
    }
}

impl AsFd for Links {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The interface that a message is about; `None` if that is something else of it, such as its place in a bridge.
fn interface(body: &[u8]) -> Option<(i32, Known)> {
    let family = *body.first()?;
    if i32::from(family) != libc::AF_UNSPEC {
        return None;
    }
    let hardware = u16::from_ne_bytes(*body.get(2..)?.first_chunk()?);
    let index = i32::from_ne_bytes(*body.get(4..)?.first_chunk()?);
    let mut attributes = netlink::attributes(body.get(IFINFO..)?);
    let (_, name) = attributes.find(|(kind, _)| *kind == libc::IFLA_IFNAME)?;
    let name = name.strip_suffix(&[0]).unwrap_or(name);
    let known = Known {
        name: String::from_utf8_lossy(name).into_owned(),
        hardware,
    };
    Some((index, known))
}

const MOST_NEWS: usize = 1024;
/// The attribute `IFLA_EXT_MASK` with `RTEXT_FILTER_SKIP_STATS`: a list is shorter so.
const WITHOUT_COUNTERS: [u8; 8] = {
    let [a, b] = 8_u16.to_ne_bytes();
    let [c, d] = 29_u16.to_ne_bytes();
    let [e, f, g, h] = 8_u32.to_ne_bytes();
    [a, b, c, d, e, f, g, h]
};

#[cfg(test)]
mod tests {
    use super::*;

    fn link(kind: u16, family: u8, index: i32, name: &str) -> Vec<u8> {
        let mut name = name.as_bytes().to_vec();
        name.push(0);
        let value = name.len() as u16 + 4;
        let mut body = vec![family, 0];
        body.extend(libc::ARPHRD_ETHER.to_ne_bytes());
        body.extend(index.to_ne_bytes());
        body.extend([0; 8]);
        body.extend(value.to_ne_bytes());
        body.extend(libc::IFLA_IFNAME.to_ne_bytes());
        body.extend(name);
        body.resize(body.len().next_multiple_of(4), 0);
        headed(kind, 0, &body)
    }

    fn headed(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
        let mut message = (16 + body.len() as u32).to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend([0; 8]);
        message.extend(body);
        message
    }

    fn names(links: &Links) -> Vec<(i32, &str)> {
        let all = links.all().iter();
        all.map(|(index, it)| (*index, it.name.as_str())).collect()
    }

    #[test]
    fn interfaces_come_go_and_are_renamed_and_a_list_forgets_what_it_does_not_name() {
        let mut links = Links::watch().unwrap();
        (links.all, links.listed) = (BTreeMap::new(), None);
        let bridge = libc::AF_BRIDGE as u8;
        for message in [
            link(RTM_NEWLINK, 0, 7, "vnet0"),
            link(RTM_NEWLINK, 0, 8, "vnet1"),
            link(RTM_NEWLINK, 0, 8, "web"),
            // It leaves a bridge.
            link(RTM_DELLINK, bridge, 7, "vnet0"),
        ] {
            links.hear(&message).unwrap();
        }
        assert_eq!(names(&links), [(7, "vnet0"), (8, "web")]);
        links.hear(&link(RTM_DELLINK, 0, 8, "web")).unwrap();
        assert_eq!(names(&links), [(7, "vnet0")]);
        links.listed = Some(BTreeSet::new());
        let list = [
            link(RTM_NEWLINK, 0, 9, "vnet2"),
            headed(NLMSG_DONE, 0, &[0; 4]),
        ];
        links.hear(&list.concat()).unwrap();
        assert_eq!(names(&links), [(9, "vnet2")]);
        assert!(links.listed.is_none());
        // A list that changed while it was made is asked for again.
        links.listed = Some(BTreeSet::from([9]));
        links
            .hear(&headed(NLMSG_DONE, NLM_F_DUMP_INTR, &[0; 4]))
            .unwrap();
        assert!(links.listed.is_some() && !links.again);
        let whole = list.concat();
        for len in 0..whole.len() {
            let _ = interface(&whole[..len]);
            let _ = netlink::messages(&whole[..len]).count();
        }
    }

    #[test]
    fn what_there_is_is_listed() {
        let mut links = Links::watch().unwrap();
        while !links.read().unwrap() {
            std::thread::yield_now();
        }
        let loopback = &links.all()[&1];
        assert_eq!(
            (loopback.name.as_str(), loopback.hardware),
            ("lo", libc::ARPHRD_LOOPBACK)
        );
    }
}
