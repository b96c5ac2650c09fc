//! Phases of a port: going to sleep, hearing news, going away, coming back.

use std::time::{Duration, Instant};

use vnplug_ring::control::REVOKED;
use vnplug_ring::layout::Life;
use vnplug_ring::{Consumer, Wait};

use super::link::Link;
use super::{Port, Ready};
use crate::error::Error;

/// See the table in [`super`].
#[derive(Debug)]
pub(super) enum Phase {
    /// Attached.
    Live,
    /// A ring was closed and nobody said why yet.
    Closing {
        /// When to stop waiting for the reason.
        until: Instant,
    },
    /// Not attached; to be reopened.
    Away {
        /// When to try next.
        at: Instant,
        /// What happened.
        why: Error,
    },
    /// The source ended.
    Ended,
    /// Over for good.
    Failed(Error),
}

/// What a port without an obvious packet has to say.
pub(super) enum Standing {
    /// There are packets after all.
    Packets,
    /// Nothing yet.
    Quiet,
    /// The source ended.
    Ended,
}

impl Port {
    /// No ring had a packet: looks at the descriptors, arms the rings, moves the phase.
    #[cold]
    pub(super) fn idle(&mut self) -> Result<Standing, Error> {
        self.unflag();
        self.attend(Some(Duration::ZERO))?;
        self.arm_all();
        // Asked after arming, so that a packet is either seen here or rings.
        if self.seek() {
            return Ok(Standing::Packets);
        }
        self.advance()
    }

    /// See [`Port::wait`].
    pub(super) fn sleep(&mut self, timeout: Option<Duration>) -> Result<Ready, Error> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.unflag();
        let mut rang = self.attend(Some(Duration::ZERO))?.wake;
        let mut due = None;
        loop {
            let armed = self.arm_all();
            let unread = self.rings.iter_mut().any(|ring| !ring.is_drained());
            if unread && (rang || armed.ready || !matches!(self.phase, Phase::Live)) {
                return Ok(Ready::Now);
            }
            if !unread && !matches!(self.advance(), Ok(Standing::Quiet)) {
                return Ok(Ready::Now);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let cap = armed.at_most.filter(|_| unread).map(|delay| {
                // Of the first look: those for room that is held back make it no longer.
                let due = *due.get_or_insert_with(|| Instant::now() + delay);
                due.saturating_duration_since(Instant::now())
            });
            let time = [left, cap].into_iter().flatten().min();
            let seen = self.attend(time)?;
            if seen.interrupted {
                return Ok(Ready::Interrupted);
            }
            if seen.nothing() {
                let waited_enough = cap.is_some_and(|cap| left.is_none_or(|left| cap <= left));
                return Ok(if waited_enough {
                    Ready::Now
                } else {
                    Ready::TimedOut
                });
            }
            rang = seen.wake;
        }
    }

    /// True while no ring's life is over.
    pub(super) fn all_open(&self) -> bool {
        self.hosted().iter().all(|ring| ring.life() == Life::Open)
    }

    /// Takes a fresh attachment into use.
    pub(super) fn install(&mut self, mut link: Link, rings: Vec<Consumer>) -> Result<(), Error> {
        if let Some((wake, control)) = link.own_fds() {
            self.watch.attach(wake, control)?;
        }
        (self.flagged, self.will_ring) = (false, false);
        self.look_again = None;
        self.revoked = None;
        let opened = &link.opened;
        self.number = opened.port;
        self.device.clone_from(&opened.device);
        (self.link_type, self.snaplen) = (opened.link_type, opened.snaplen);
        self.forget_rings();
        (self.rings, self.current, self.turn) = (rings, 0, 0);
        self.outbox = link.outbox.take();
        self.shared.attach(&link);
        (self.link, self.phase) = (Some(link), Phase::Live);
        self.set_alarm();
        self.opened_at = Instant::now();
        if let Some(seat) = self.watch.seat() {
            seat.stir();
        }
        // What came between the opening and the watching.
        self.hear();
        Ok(())
    }

    /// Hears what the host said unasked.
    pub(super) fn hear(&mut self) {
        while let Some(link) = self.link.as_ref() {
            match link.unasked() {
                Ok(None) => return,
                Ok(Some(reason)) => self.leave(Error::Gone(reason)),
                Err(error) => self.leave(error),
            }
        }
    }

    /// Waits for the descriptors and hears what they have to say.
    pub(super) fn attend(
        &mut self,
        timeout: Option<Duration>,
    ) -> Result<super::watch::Seen, Error> {
        let seen = self.watch.look(timeout)?;
        if seen.wake {
            self.hush();
        }
        // In a bundle another port may have read what this one is to hear.
        if seen.control || self.watch.shared().is_some() {
            self.hear();
        }
        Ok(seen)
    }

    /// Empties the doorbell.
    pub(super) fn hush(&mut self) {
        self.will_ring = false;
        if let Some(direct) = &mut self.direct {
            direct.hush();
        }
        if let Some(Err(error)) = self.link.as_ref().map(Link::hush) {
            // The control socket tells more, if it has anything to tell.
            self.hear();
            self.leave(error);
        }
    }

    pub(super) fn arm_all(&mut self) -> Armed {
        self.release();
        self.arm_all_lent()
    }

    /// As `arm_all`, but what was taken stays lent.
    pub(super) fn arm_all_lent(&mut self) -> Armed {
        self.look_again_for_room();
        let mut armed = Armed::default();
        let (watermark, delay) = (self.options.watermark, self.options.max_delay_us());
        // In a bundle others empty the doorbell.
        self.will_ring = watermark <= 1 && self.watch.shared().is_none();
        for ring in &mut self.rings {
            let (watermark, delay) = match ring.is_beside() {
                // A member has no timer.
                true => (1, 0),
                false => (watermark, delay),
            };
            match ring.arm_lent(watermark, delay) {
                // Or its life is over, of which `advance` knows more.
                Wait::Ready => {
                    self.will_ring = false;
                    armed.ready |= !ring.is_drained();
                }
                Wait::SleepAtMost(us) => {
                    self.will_ring = false;
                    let delay = Duration::from_micros(us.into());
                    armed.at_most = Some(armed.at_most.map_or(delay, |other| other.min(delay)));
                }
                Wait::Sleep => {}
            }
        }
        armed
    }

    /// Room that is held back for what was posted becomes free without a word of the host, and nothing comes while
    /// none is there: the timer is set as long as that lasts.
    fn look_again_for_room(&mut self) {
        if self.flagged || !matches!(self.phase, Phase::Live) {
            return;
        }
        let holds_back = self.rings.iter().any(Consumer::holds_back);
        match self.look_again {
            None if !holds_back => return,
            Some(at) if holds_back && Instant::now() < at => return,
            _ => {}
        }
        self.look_again = holds_back.then(|| Instant::now() + LOOK_AGAIN);
        self.set_alarm();
    }

    /// Moves the phase, now that every ring is drained.
    pub(super) fn advance(&mut self) -> Result<Standing, Error> {
        loop {
            // What the rings themselves say comes before what happened to the connection.
            let unsettled = !matches!(self.phase, Phase::Ended | Phase::Failed(_));
            match self.life() {
                // The last packets may have been published just before the life was over.
                life if unsettled && life != Life::Open && self.seek() => {
                    return Ok(Standing::Packets);
                }
                Life::Ended if unsettled => self.end(),
                Life::Quarantined if unsettled => self.fail(Error::Quarantined),
                Life::Failed if unsettled => {
                    let why = self.failure();
                    self.fail(Error::SourceFailed(why));
                }
                Life::Revoked if unsettled => {
                    let why = self.revocation();
                    // What it sends it may still send, if only receiving was revoked.
                    let sends = self.outbox.as_ref();
                    if sends.is_some_and(|outbox| outbox.life() == Life::Open) {
                        // Nobody is to wait for what does not come.
                        self.watch.set_timer(Some(Duration::ZERO));
                        return Err(Error::Gone(why));
                    }
                    self.fail(Error::Gone(why));
                }
                Life::Closed if matches!(self.phase, Phase::Live) => {
                    self.phase = Phase::Closing {
                        until: Instant::now() + CLOSING_LIMIT,
                    };
                    self.watch.set_timer(Some(CLOSING_LIMIT));
                }
                _ => {}
            }
            match &self.phase {
                Phase::Live => return Ok(Standing::Quiet),
                Phase::Ended => return Ok(Standing::Ended),
                Phase::Failed(error) => return Err(error.clone()),
                Phase::Closing { until } => {
                    if Instant::now() < *until {
                        return Ok(Standing::Quiet);
                    }
                    // Another thread may have read the reason with an answer of its own.
                    self.hear();
                    self.leave(Error::Gone("the host closed it without a reason".into()));
                }
                Phase::Away { at, why } => {
                    // The daemon may have freed the rings, which said so, before they were looked at.
                    let is_revoked = matches!(why, Error::Gone(reason) if reason == REVOKED);
                    if !self.options.reconnect || is_revoked {
                        let why = why.clone();
                        self.fail(why);
                        continue;
                    }
                    let at = *at;
                    // The memory is of no more use; a device that is unplugged needs it unmapped.
                    self.forget_rings();
                    self.leaving = None;
                    if Instant::now() < at {
                        return Ok(Standing::Quiet);
                    }
                    self.reopen();
                    if matches!(self.phase, Phase::Live) {
                        self.arm_all();
                        if self.seek() {
                            return Ok(Standing::Packets);
                        }
                    }
                }
            }
        }
    }

    /// The connection is of no more use; what was published stays readable.
    fn leave(&mut self, why: Error) {
        self.will_ring = false;
        if let Some(link) = self.link.take() {
            if let Some((wake, control)) = link.own_fds() {
                self.watch.detach(wake, control);
            }
            self.leaving = Some(link);
        }
        if matches!(self.phase, Phase::Live | Phase::Closing { .. }) {
            if self.opened_at.elapsed() > STEADY {
                self.backoff = FIRST_BACKOFF;
            }
            self.away(why);
        }
    }

    fn away(&mut self, why: Error) {
        self.phase = Phase::Away {
            at: Instant::now() + self.backoff,
            why,
        };
        self.flagged = false;
        self.watch.set_timer(Some(self.backoff));
        // A machine that moves is back within seconds, and should not be waited for longer than it is away.
        let since = self.away_since.get_or_insert_with(Instant::now);
        let most = match since.elapsed() < SOON {
            true => SOON_BACKOFF,
            false => LAST_BACKOFF,
        };
        self.backoff = (self.backoff * 2).min(most);
    }

    fn reopen(&mut self) {
        let Phase::Away { why, .. } = &self.phase else {
            return;
        };
        let why = why.clone();
        if self.options.request.joins {
            // The port of the switch that it had.
            self.options.request.device.clone_from(&self.device);
        }
        let seat = self.watch.seat();
        let opened = Link::open(&self.options, &self.rules, true, REOPEN_LIMIT, seat)
            .and_then(|(link, rings)| self.install(link, rings));
        if opened.is_ok()
            && self.options.direct
            && let Err(error) = self.enter_group(None)
        {
            self.end_direct(&error);
        }
        let refused = matches!(opened, Err(Error::Permission { .. }));
        let since = refused.then(|| self.refused_since.unwrap_or_else(Instant::now));
        self.refused_since = since;
        // A daemon that starts makes its socket before it gives it to its group. Later it is for
        // good: a program that gave up its rights after it opened the port must be told.
        let starts = since.is_some_and(|since| since.elapsed() < REFUSED_LIMIT);
        match opened {
            Ok(()) => {
                self.away_since = None;
                self.shared.tally.add_reopened();
            }
            Err(error) if error.heals() || starts => self.away(why),
            Err(error) => self.fail(match why {
                Error::Gone(reason) => Error::Gone(format!("{reason}; reopening: {error}")),
                _ => error,
            }),
        }
    }

    fn end(&mut self) {
        self.over(Phase::Ended);
    }

    fn fail(&mut self, error: Error) {
        self.over(Phase::Failed(error));
    }

    /// Nothing comes any more; the descriptor stays readable so that nobody waits in vain.
    fn over(&mut self, phase: Phase) {
        self.phase = phase;
        self.forget_rings();
        self.leaving = None;
        self.flagged = false;
        self.watch.set_timer(Some(Duration::ZERO));
    }

    /// Unmaps the rings; what they say of losses stays, for no packet may have told of the last ones.
    fn forget_rings(&mut self) {
        self.lost_before = self.dropped();
        self.leave_group();
        self.beside.clear();
        (self.current, self.turn, self.looked) = (0, 0, None);
        self.rings.clear();
        self.outbox = None;
    }

    /// Why the source failed, as the host says; a host that cannot be asked does not hide that it did.
    fn failure(&mut self) -> String {
        let host = self.stats().ok().and_then(|stats| stats.host);
        let mut labels = host.map(|host| host.labels).unwrap_or_default().into_iter();
        let told = labels.find(|(key, _)| key == "failure");
        told.map_or_else(
            || "the daemon's log says why".to_owned(),
            |(_, reason)| reason,
        )
    }

    /// What an operator took, as the host says.
    fn revocation(&mut self) -> String {
        if let Some(why) = &self.revoked {
            return why.clone();
        }
        self.hear();
        let host = match self.link {
            Some(_) => self.stats().ok().and_then(|stats| stats.host),
            None => None,
        };
        let mut labels = host.map(|host| host.labels).unwrap_or_default().into_iter();
        let told = labels.find(|(key, _)| key == "revoked");
        let why = match (told, &self.phase) {
            (Some((_, why)), _) => why,
            // It was closed, before it was asked about or meanwhile.
            (
                None,
                Phase::Away {
                    why: Error::Gone(why),
                    ..
                },
            ) => why.clone(),
            _ => "an operator revoked it".to_owned(),
        };
        self.revoked.insert(why).clone()
    }

    /// The rings' life as one.
    fn life(&self) -> Life {
        let rings = self.hosted();
        let any = |life| rings.iter().any(|ring| ring.life() == life);
        if any(Life::Quarantined) {
            Life::Quarantined
        } else if any(Life::Failed) {
            // Also if other queues go on: a reader is not to take a part for the whole.
            Life::Failed
        } else if any(Life::Revoked) {
            Life::Revoked
        } else if any(Life::Closed) {
            Life::Closed
        } else if any(Life::Open) || rings.is_empty() {
            Life::Open
        } else {
            Life::Ended
        }
    }
}

/// What arming all rings found.
#[derive(Debug, Default)]
pub(super) struct Armed {
    /// A ring has as many unread packets as the watermark says.
    pub(super) ready: bool,
    /// Some packets are unread, fewer than the watermark: sleep at most this time.
    pub(super) at_most: Option<Duration>,
}

/// How long room stays held back that has become free, while its reader sleeps.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// First pause before reopening.
pub(super) const FIRST_BACKOFF: Duration = Duration::from_millis(10);
/// Longest pause before reopening.
const LAST_BACKOFF: Duration = Duration::from_millis(500);
/// The same in the beginning, and how long that is.
const SOON_BACKOFF: Duration = Duration::from_millis(80);
const SOON: Duration = Duration::from_secs(60);
/// Longest time that a socket refuses this user because its daemon has just started.
const REFUSED_LIMIT: Duration = Duration::from_secs(3);
/// A port that lived this long starts with the first pause again.
const STEADY: Duration = Duration::from_secs(1);
/// Longest wait for the reason of a closed ring.
const CLOSING_LIMIT: Duration = Duration::from_millis(200);
/// Longest wait for one answer while reopening.
const REOPEN_LIMIT: Duration = Duration::from_secs(2);
