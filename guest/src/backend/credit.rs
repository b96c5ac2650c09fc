//! What one end of a channel may say and has taken, and its events.

use vnplug_ring::control::Backend;
use vnplug_ring::control::backend::{MAX_SAID, WINDOW, cost};

use crate::error::Error;

/// One end's books.
#[derive(Debug)]
pub(super) struct Credit {
    channel: u32,
    /// What was said and is not known to be taken.
    untaken: u64,
    /// Taken, and not told: told when it is worth a message.
    owed: u64,
    /// How often each event of this side happened.
    sent: Vec<u64>,
    /// How often each event of the other side happened, as far as that was handed on.
    heard: Vec<u64>,
}

impl Credit {
    /// Of a new channel: events that this side sends, and the other one.
    pub(super) fn new(channel: u32, sends: u8, hears: u8) -> Self {
        Self {
            channel,
            untaken: 0,
            owed: 0,
            sent: vec![0; sends.into()],
            heard: vec![0; hears.into()],
        }
    }

    /// A message that may be said now.
    pub(super) fn say(&mut self, bytes: &[u8]) -> Result<Backend, Error> {
        if bytes.len() > MAX_SAID {
            return Err(Error::Invalid("a message of more than 65,536 bytes"));
        }
        let cost = cost(bytes.len());
        if self.untaken + cost > WINDOW {
            return Err(Error::Full);
        }
        self.untaken += cost;
        Ok(Backend::Say {
            channel: self.channel,
            bytes: bytes.to_vec(),
        })
    }

    /// An event happened `count` times more.
    pub(super) fn event(&mut self, event: u8, count: u64) -> Result<Backend, Error> {
        let total = self.sent.get_mut(usize::from(event));
        let total = total.ok_or(Error::Invalid("an event that the channel does not have"))?;
        *total = total.saturating_add(count);
        Ok(Backend::Events {
            channel: self.channel,
            totals: self.sent.clone(),
        })
    }

    /// A message of `len` bytes was taken; what is to be told of it now, if anything.
    pub(super) fn taken(&mut self, len: usize) -> Option<Backend> {
        self.owed += cost(len);
        if self.owed < WINDOW / 4 {
            return None;
        }
        Some(Backend::Took {
            channel: self.channel,
            cost: std::mem::take(&mut self.owed),
        })
    }

    /// The other side took something.
    pub(super) fn may_say_more(&mut self, cost: u64) {
        self.untaken = self.untaken.saturating_sub(cost);
    }

    /// The events that happened since they were heard last: (event, how often).
    pub(super) fn happened(&mut self, totals: &[u64]) -> Vec<(u8, u64)> {
        let mut news = Vec::new();
        for (event, (total, heard)) in (0..).zip(totals.iter().zip(&mut self.heard)) {
            let count = total.saturating_sub(*heard);
            if count > 0 {
                *heard = *total;
                news.push((event, count));
            }
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_window_refuses_and_what_is_taken_opens_it() {
        let mut credit = Credit::new(1, 0, 0);
        let large = vec![0; MAX_SAID];
        let mut said = 0;
        while credit.say(&large).is_ok() {
            said += 1;
        }
        assert_eq!(credit.say(&large), Err(Error::Full));
        assert_eq!(said, 3);
        credit.may_say_more(cost(MAX_SAID));
        assert!(credit.say(&large).is_ok());
        assert!(matches!(
            credit.say(&vec![0; MAX_SAID + 1]),
            Err(Error::Invalid(_))
        ));
    }

    #[test]
    fn events_add_up_however_they_are_told() {
        let (mut here, mut there) = (Credit::new(1, 2, 0), Credit::new(1, 0, 2));
        let mut told = Vec::new();
        for round in 0..1000_u64 {
            let Backend::Events { totals, .. } = here.event((round % 2) as u8, 2).unwrap() else {
                panic!("no events");
            };
            if round % 7 == 0 || round == 999 {
                told.extend(there.happened(&totals));
            }
        }
        let sum = |event| {
            told.iter()
                .filter(|it| it.0 == event)
                .map(|it| it.1)
                .sum::<u64>()
        };
        assert_eq!((sum(0), sum(1)), (1000, 1000));
        assert!(here.event(2, 1).is_err());
    }
}
