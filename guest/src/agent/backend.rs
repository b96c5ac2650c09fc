//! Channels between applications of this guest and back-ends on the host.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use vnplug_ring::control::backend::{Connected, Mapped};
use vnplug_ring::control::{Backend, Message, RingPlace, code};

use super::app::Hangup;
use super::arena::{self, Handed};
use super::plugged::{LOOK, PLUGGED};
use super::serve::Agent;

/// A channel of an application.
#[derive(Debug)]
pub(super) struct ChannelEntry {
    app: u32,
    /// Memory that it maps, by its number; in the pool if it has a place there.
    regions: BTreeMap<u32, Option<RingPlace>>,
    /// The back-end hung up. The entry lives on while its application maps memory of it.
    over: bool,
}

/// Memory whose device was plugged, and that the guest's kernel has not found yet.
#[derive(Debug)]
pub(super) struct Awaited {
    mapped: Mapped,
    next: Instant,
    until: Instant,
}

impl ChannelEntry {
    /// What its application maps of the pool.
    pub(super) fn places(&self) -> impl Iterator<Item = &RingPlace> {
        self.regions.values().flatten()
    }
}

impl Agent {
    /// An application says something of back-ends.
    pub(super) fn say_to_back_end(
        &mut self,
        app: u32,
        id: u32,
        said: Backend,
    ) -> Result<(), Hangup> {
        let channel = match &said {
            Backend::List | Backend::Connect(_) => {
                return self.relay(app, id, &Message::Backend(said));
            }
            Backend::Say { channel, .. }
            | Backend::Took { channel, .. }
            | Backend::Events { channel, .. }
            | Backend::Hangup { channel, .. }
            | Backend::Withdraw { channel, .. } => *channel,
            _ => {
                let text = "a back-end is a process on the host, and not in a guest";
                return self.refuse(app, id, code::DENIED, text);
            }
        };
        // Of a channel that is over, which it may not know yet.
        let Some(entry) = self.channels.get_mut(&channel).filter(|it| it.app == app) else {
            return Ok(());
        };
        let is_known = match said {
            Backend::Withdraw { region, .. } => entry.regions.remove(&region).is_some(),
            Backend::Hangup { .. } => {
                entry.regions.clear();
                !std::mem::replace(&mut entry.over, true)
            }
            _ => !entry.over,
        };
        if !is_known {
            return Ok(());
        }
        self.drop_if_over(channel);
        self.say(&Message::Backend(said), 0, app);
        Ok(())
    }

    /// The host made a channel for an application.
    pub(super) fn connected(
        &mut self,
        app: u32,
        id: u32,
        connected: Connected,
    ) -> Result<(), Hangup> {
        let entry = ChannelEntry {
            app,
            regions: BTreeMap::new(),
            over: false,
        };
        self.channels.insert(connected.channel, entry);
        if let Some(app) = self.apps.get_mut(&app) {
            app.channels += 1;
        }
        let message = Message::Backend(Backend::Connected(connected));
        self.answer(app, id, &message, Vec::new())
    }

    /// A back-end says something.
    pub(super) fn of_back_end(&mut self, said: Backend) {
        let channel = match &said {
            Backend::Say { channel, .. }
            | Backend::Took { channel, .. }
            | Backend::Events { channel, .. }
            | Backend::Hangup { channel, .. }
            | Backend::Withdraw { channel, .. }
            | Backend::Mapped(Mapped { channel, .. }) => *channel,
            other => return log::debug!("the host says {other:?}"),
        };
        let Some(entry) = self.channels.get_mut(&channel) else {
            return;
        };
        let app = entry.app;
        let mut fds = Vec::new();
        match &said {
            Backend::Mapped(mapped) => match memory(&self.pools, &mut self.handed, mapped) {
                Some(fd) => {
                    let place = RingPlace {
                        offset: mapped.offset,
                        len: mapped.len,
                    };
                    let in_pool = (mapped.memory == 0).then_some(place);
                    entry.regions.insert(mapped.region, in_pool);
                    fds.push(fd);
                }
                None if entry.over => return self.refuse_memory(app, mapped),
                None => {
                    let now = Instant::now();
                    self.awaited.push(Awaited {
                        mapped: *mapped,
                        next: now + LOOK,
                        until: now + PLUGGED,
                    });
                    return;
                }
            },
            Backend::Hangup { .. } => {
                entry.over = true;
                self.give_up_awaited(app, |mapped| mapped.channel == channel);
            }
            // The application was not told of it, and need not be told to let go.
            Backend::Withdraw { region, .. } if !entry.regions.contains_key(region) => {
                let region = *region;
                return self.give_up_awaited(app, |mapped| mapped.region == region);
            }
            _ => {}
        }
        if let Err(hangup) = self.answer(app, 0, &Message::Backend(said), fds) {
            return self.drop_app(app, &hangup);
        }
        self.drop_if_over(channel);
    }

    /// Looks for devices that were plugged: the guest's kernel takes its time to find one. When to look again.
    pub(super) fn look_for_devices(&mut self, now: Instant) -> Option<Instant> {
        let due = self.awaited.extract_if(.., |it| it.next <= now);
        let due: Vec<Awaited> = due.collect();
        for mut awaited in due {
            let mapped = awaited.mapped;
            // If it is still not there, it is awaited anew; then it is for as long as before.
            let before = self.awaited.len();
            self.of_back_end(Backend::Mapped(mapped));
            if self.awaited.len() == before {
                continue;
            }
            self.awaited.truncate(before);
            if now < awaited.until {
                awaited.next = now + LOOK;
                self.awaited.push(awaited);
            } else if let Some(entry) = self.channels.get(&mapped.channel) {
                let app = entry.app;
                log::warn!(
                    "memory for application {app} was plugged, and no device is found: is there room for \
                     it? (dmesg says why not)"
                );
                self.refuse_memory(app, &mapped);
            }
        }
        self.awaited.iter().map(|it| it.next).min()
    }

    fn give_up_awaited(&mut self, app: u32, which: impl Fn(&Mapped) -> bool) {
        let gone = self.awaited.extract_if(.., |it| which(&it.mapped));
        let gone: Vec<Awaited> = gone.collect();
        for awaited in gone {
            self.refuse_memory(app, &awaited.mapped);
        }
    }

    /// An application does not get memory; the host is told that nobody maps it.
    fn refuse_memory(&mut self, app: u32, mapped: &Mapped) {
        let refused = Backend::Withdraw {
            channel: mapped.channel,
            region: mapped.region,
            within_ms: 0,
        };
        self.say(&Message::Backend(refused), 0, app);
    }

    /// The host knows none of the channels any more.
    pub(super) fn lose_channels(&mut self, reason: &str, hangups: &mut Vec<(u32, Hangup)>) {
        self.awaited.clear();
        for (channel, entry) in std::mem::take(&mut self.channels) {
            let places: Vec<RingPlace> = entry.places().copied().collect();
            if let Some(app) = self.apps.get_mut(&entry.app) {
                // It may map them until it is gone, or connects again.
                app.mapped.extend(places);
                app.channels -= 1;
            }
            let reason = reason.to_owned();
            let message = Message::Backend(Backend::Hangup { channel, reason });
            if !entry.over
                && let Err(hangup) = self.answer(entry.app, 0, &message, Vec::new())
            {
                hangups.push((entry.app, hangup));
            }
        }
    }

    /// An application is gone: the places that it mapped.
    pub(super) fn forget_channels(&mut self, app: u32) -> Vec<RingPlace> {
        let channels = &self.channels;
        let is_own = |it: &Awaited| {
            let entry = channels.get(&it.mapped.channel);
            entry.is_none_or(|entry| entry.app == app)
        };
        self.awaited.retain(|it| !is_own(it));
        let gone = self.channels.extract_if(.., |_, entry| entry.app == app);
        gone.flat_map(|(_, entry)| entry.regions.into_values().flatten())
            .collect()
    }

    fn drop_if_over(&mut self, channel: u32) {
        let entry = self.channels.get(&channel);
        if let Some(entry) = entry.filter(|it| it.over && it.regions.is_empty()) {
            if let Some(app) = self.apps.get_mut(&entry.app) {
                app.channels -= 1;
            }
            self.channels.remove(&channel);
        }
    }
}

/// The memory that an application is to map.
fn memory(pools: &[super::find::Pool], handed: &mut Handed, mapped: &Mapped) -> Option<OwnedFd> {
    match mapped.memory {
        0 => pools.first()?.memory.try_clone().ok(),
        number => arena::find_plugged(Path::new("/"), handed, number, mapped.writable),
    }
}
