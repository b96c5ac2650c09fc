//! Where frames leave: each port is noted what a batch has for it, and is given that at once.
//!
//! | file | what it has |
//! |---|---|
//! | `mod.rs` | which ports there are, and what each is like |
//! | `port.rs` | one of them |
//! | `note.rs` | which of them a frame leaves by, and as what |
//! | `due.rs` | what a batch has for one of them |
//! | `glance.rs` | how often segments are looked for that can be merged |
//! | `send.rs` | that is given to it, now or later |

mod due;
mod glance;
mod note;
mod port;
mod send;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll::{self, EventData, EventFlags};
use vnplug_frame::aggregate::Aggregator;
use vnplug_frame::offload::Pieces;
use vnplug_ring::offload::Offload;

use self::due::Item;
pub(crate) use self::due::{Due, Out, Wholes};
use self::glance::Glance;
pub(crate) use self::note::Noted;
pub(crate) use self::port::PortCounters;
use self::port::{Kept, Port};
use crate::batch::Entered;
use crate::edits::Edits;
use crate::emulation::Emulation;
use crate::forward::Number;
use crate::link::{Link, Losses};
use crate::settings::PortSettings;
use crate::vhost::Guest;

/// The ports of a switch.
pub(crate) struct Exits {
    /// Watches the links.
    epoll: Arc<OwnedFd>,
    ports: Vec<Option<Port>>,
    /// Those that are read by themselves, each as often as it is.
    read: Vec<Number>,
    /// Those that have something to be sent.
    touched: Vec<Number>,
    /// What super-frames of the batch became.
    pieces: Pieces,
    /// What became of frames' tags.
    edits: Edits,
    /// Frames on slow wires.
    emulation: Emulation,
    /// Super-frames that were made for a port.
    aggregator: Aggregator,
    /// What a port is given with them; empty between two ports.
    merged: Vec<Item>,
}

impl Exits {
    /// Without ports; `epoll` will watch their links.
    pub(crate) fn new(epoll: OwnedFd) -> Self {
        Self {
            epoll: Arc::new(epoll),
            ports: Vec::new(),
            read: Vec::new(),
            touched: Vec::new(),
            pieces: Pieces::default(),
            edits: Edits::default(),
            emulation: Emulation::default(),
            aggregator: Aggregator::default(),
            merged: Vec::new(),
        }
    }

    /// Tells which links have frames or are written to again, each by its port's number.
    pub(crate) fn epoll(&self) -> &Arc<OwnedFd> {
        &self.epoll
    }

    pub(crate) fn port(&mut self, number: Number) -> Option<&mut Port> {
        self.ports.get_mut(usize::from(number))?.as_mut()
    }

    /// What went through each port.
    pub(crate) fn counters(&self) -> Vec<(Number, PortCounters)> {
        let ports = (0..).zip(&self.ports);
        let counters = |(at, port): (Number, &Option<Port>)| Some((at, port.as_ref()?.counters));
        ports.filter_map(counters).collect()
    }

    /// Adds a port with a link.
    ///
    /// # Errors
    /// The system's, if the link cannot be watched; the entrance is told.
    pub(crate) fn add(
        &mut self,
        number: Number,
        link: Box<dyn Link>,
        losses: Losses,
    ) -> std::io::Result<()> {
        self.remove(number);
        let data = EventData::new_u64(u64::from(number));
        if let Err(error) = epoll::add(&*self.epoll, &link, data, EventFlags::IN) {
            losses.tell(number);
            return Err(error.into());
        }
        self.put(number, Some(link), Some(losses));
        Ok(())
    }

    /// Adds a port whose link nobody has to watch here.
    pub(crate) fn add_unwatched(&mut self, number: Number, link: Box<dyn Link>) {
        self.put(number, Some(link), None);
    }

    /// Adds a port whose frames go through rings.
    pub(crate) fn add_ring(&mut self, number: Number) {
        self.put(number, None, None);
    }

    fn put(&mut self, number: Number, link: Option<Box<dyn Link>>, losses: Option<Losses>) {
        let at = usize::from(number);
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, || None);
        }
        self.ports[at] = Some(Port {
            takes_tails: link.as_ref().is_some_and(|link| link.takes_tails()),
            link,
            losses,
            is_ready: false,
            is_watched: false,
            counters: PortCounters::default(),
            todo: Vec::new(),
            is_slow: false,
            kept: Kept::default(),
            gro: 0,
            glance: Glance::default(),
            expands_acks: false,
            is_shared: false,
        });
    }

    /// Lanes give a port frames from now on, too: the guest that is there, if it is one.
    pub(crate) fn share(&mut self, number: Number) -> Option<Arc<Guest>> {
        let port = self.port(number)?;
        let guest = port.link.as_ref()?.guest().cloned()?;
        port.is_shared = true;
        Some(guest)
    }

    /// How a port is given frames from now on. Of one that goes through rings nothing of it is true.
    pub(crate) fn set(&mut self, number: Number, settings: &PortSettings, now_us: u64) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
            return;
        };
        port.kept = Kept {
            cuts: settings.cuts,
            sums: settings.sums,
        };
        port.gro = settings.gro;
        port.glance = Glance::default();
        port.expands_acks = settings.expands_acks && settings.gro > 0;
        if let Some(link) = &mut port.link {
            link.expand_acks(port.expands_acks);
            // What is on its way stays there, so that no frame overtakes it.
            port.is_slow = self.emulation.set(number, &settings.wire, now_us);
        }
    }

    /// Whether a port's frames go through rings; `None` if there is no such port.
    pub(crate) fn is_ring(&self, number: Number) -> Option<bool> {
        let port = self.ports.get(usize::from(number))?.as_ref()?;
        Some(port.link.is_none())
    }

    /// Whether a port's frames take their time.
    pub(crate) fn is_slow(&self, number: Number) -> bool {
        let port = self.ports.get(usize::from(number));
        matches!(port, Some(Some(port)) if port.is_slow)
    }

    /// Frames are on slow wires.
    #[inline]
    pub(crate) fn is_late(&self) -> bool {
        self.emulation.next_us().is_some()
    }

    /// When the next of them arrives.
    pub(crate) fn next_us(&self) -> Option<u64> {
        self.emulation.next_us()
    }

    /// Removes a port, and says who is to be told if nobody knows it yet.
    pub(crate) fn remove(&mut self, number: Number) -> Option<Losses> {
        let port = self.ports.get_mut(usize::from(number))?.take()?;
        self.emulation.remove(number);
        if let Some(link) = port.link
            && port.losses.is_some()
        {
            // NB: before it is closed, which happens aside. What an uplink waits by is that of all uplinks, and stays.
            let _ = epoll::delete(&*self.epoll, &link);
        }
        port.losses
    }

    /// Somebody reads this port by itself, in the form in which it is given frames, or does not any more.
    pub(crate) fn read(&mut self, number: Number, comes: bool) {
        match (self.read.iter().position(|it| *it == number), comes) {
            (_, true) => self.read.push(number),
            (Some(at), false) => drop(self.read.swap_remove(at)),
            (None, false) => {}
        }
    }

    /// Whether a frame can go to all of these ports as it is, with its rest where it came from.
    #[inline]
    pub(crate) fn take_tails(&self, due: &[Number], it: &Entered<'_>) -> bool {
        let offload = it.offload;
        let takes = |number: &Number| match self.ports.get(usize::from(*number)) {
            Some(Some(port)) => {
                let takes = |link: &dyn Link| {
                    offload.is_none_or(|offload| port.kept.leaves(link, offload, it.len()))
                };
                // What is merged must be here.
                let is_super = offload.is_some_and(Offload::is_super_frame);
                let is_copied = port.is_slow || (!is_super && port.limits().is_some());
                port.takes_tails && !is_copied && port.link.as_deref().is_some_and(takes)
            }
            // Nobody has it.
            _ => true,
        };
        self.read.is_empty() && due.iter().all(takes)
    }

    /// The frames of the batch that these ports sent are done with.
    pub(crate) fn release(&mut self, taken: &mut Vec<Number>) {
        for number in taken.drain(..) {
            if let Some(Some(port)) = self.ports.get_mut(usize::from(number))
                && let Some(link) = &mut port.link
            {
                link.release();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};

    use rustix::event::{EventfdFlags, eventfd};
    use vnplug_os::datagrams::Rest;

    use super::*;
    use crate::batch::Batch;
    use crate::link::Given;

    /// A link that is always readable.
    struct Rung(Arc<OwnedFd>);

    impl Rung {
        fn new() -> Self {
            Self(Arc::new(eventfd(1, EventfdFlags::empty()).unwrap()))
        }
    }

    impl AsFd for Rung {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    impl Link for Rung {
        fn receive(&mut self, _: &mut Batch, _: usize) -> std::io::Result<Rest> {
            Ok(Rest::Nothing)
        }

        fn send(&mut self, _: Due<'_>) -> Given {
            Given::default()
        }
    }

    fn heard(exits: &Exits) -> Vec<u64> {
        let mut events = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 8];
        let at_once = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let count = epoll::wait(&**exits.epoll(), &mut events, Some(&at_once)).unwrap();
        let mut heard: Vec<u64> = events[..count].iter().map(|it| it.data.u64()).collect();
        heard.sort_unstable();
        heard
    }

    #[test]
    fn what_all_uplinks_wait_by_is_watched_when_one_of_them_goes() {
        let mut exits = Exits::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        let uplinks = Rung::new();
        let data = EventData::new_u64(1000);
        epoll::add(&**exits.epoll(), &uplinks, data, EventFlags::IN).unwrap();
        for number in [1, 2] {
            exits.add_unwatched(number, Box::new(Rung(Arc::clone(&uplinks.0))));
        }
        let (losses, _told) = Losses::new(Rung::new().0);
        exits.add(3, Box::new(Rung::new()), losses).unwrap();
        assert_eq!(heard(&exits), [3, 1000]);
        exits.remove(1);
        assert_eq!(heard(&exits), [3, 1000]);
        // A port with a link of its own is not heard of any more, once it is gone.
        exits.remove(3);
        assert_eq!(heard(&exits), [1000]);
    }
}
