//! A queue whose kernel filter could not be widened: it may drop what a port wants.
//!
//! The queue's thread tries again, sooner at first and then once a second, until the queue lets
//! everything through or a filter made for all present ports replaces the narrow one. Until then the
//! source's [`Standing`] says so, whatever else there is to say.

use std::sync::Arc;

use crate::source::early::EarlyDrop;
use crate::source::early::Standing;
use vnplug_os::peer_log;

/// What a queue's thread knows of its narrow filter.
#[derive(Debug)]
pub(crate) struct Stuck {
    queue: u16,
    name: String,
    trouble: Option<Trouble>,
}

#[derive(Debug)]
struct Trouble {
    standing: Arc<Standing>,
    /// Microseconds between this try and the next.
    pause_us: u64,
    due_us: u64,
}

impl Stuck {
    /// Of a queue that passes everything.
    pub(crate) fn new(queue: u16, name: &str) -> Self {
        Self {
            queue,
            name: name.to_owned(),
            trouble: None,
        }
    }

    /// Makes the kernel pass everything to a queue, now or as soon as possible.
    pub(crate) fn widen(&mut self, it: &mut dyn EarlyDrop, standing: &Arc<Standing>, now_us: u64) {
        let pause_us = self
            .trouble
            .take()
            .map_or(FIRST_PAUSE_US, |trouble| trouble.pause_us);
        match it.narrow(None) {
            Ok(()) => standing.cured(self.queue),
            Err(error) => {
                let name = &self.name;
                let what = "a kernel filter stays that may drop what ports want";
                peer_log!(log::Level::Error, "source", "{name}: {what}: {error}");
                standing.ails(self.queue, error.to_string());
                self.trouble = Some(Trouble {
                    standing: Arc::clone(standing),
                    pause_us: (pause_us * 2).min(LAST_PAUSE_US),
                    due_us: now_us + pause_us,
                });
            }
        }
    }

    /// Tries again if it is time to.
    #[inline]
    pub(crate) fn try_again(&mut self, it: &mut dyn EarlyDrop, now_us: u64) {
        if let Some(trouble) = &self.trouble
            && trouble.due_us <= now_us
        {
            let standing = Arc::clone(&trouble.standing);
            self.widen(it, &standing, now_us);
        }
    }

    /// The filter was replaced by one that passes everything that ports want.
    pub(crate) fn over(&mut self) {
        if let Some(trouble) = self.trouble.take() {
            trouble.standing.cured(self.queue);
        }
    }

    /// When to [try again](Self::try_again).
    #[inline]
    pub(crate) fn due_us(&self) -> Option<u64> {
        self.trouble.as_ref().map(|trouble| trouble.due_us)
    }
}

const FIRST_PAUSE_US: u64 = 1_000;
const LAST_PAUSE_US: u64 = 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::SourceError;
    use crate::source::early::{Loaded, Seat};

    /// A queue whose kernel is short of memory for this many tries.
    struct Short(u32);

    impl EarlyDrop for Short {
        fn seat(&self) -> Result<Seat, String> {
            Err("off".into())
        }

        fn narrow(&mut self, filter: Option<Box<Loaded>>) -> Result<(), SourceError> {
            assert!(filter.is_none());
            self.0 = self.0.saturating_sub(1);
            match self.0 {
                0 => Ok(()),
                _ => Err(SourceError::new("out of memory")),
            }
        }
    }

    #[test]
    fn widening_is_tried_again_until_it_succeeds_and_is_told_until_then() {
        let standing = Arc::new(Standing::default());
        standing.begin(1, "off: filters are changing");
        let (mut queue, mut stuck) = (Short(20), Stuck::new(3, "wire"));
        stuck.widen(&mut queue, &standing, 0);
        let mut now_us = 0;
        while let Some(due_us) = stuck.due_us() {
            let text = standing.text();
            assert!(text.starts_with("failing: ") && text.contains("out of memory"));
            assert!(due_us > now_us && due_us <= now_us + LAST_PAUSE_US);
            let left = queue.0;
            stuck.try_again(&mut queue, due_us - 1);
            assert_eq!(queue.0, left, "too early");
            stuck.try_again(&mut queue, due_us);
            now_us = due_us;
        }
        assert_eq!(queue.0, 0);
        assert_eq!(standing.text(), "off: filters are changing");
    }

    #[test]
    fn a_filter_for_all_ports_ends_it_as_well() {
        let standing = Arc::new(Standing::default());
        let (mut queue, mut stuck) = (Short(9), Stuck::new(0, "wire"));
        stuck.widen(&mut queue, &standing, 0);
        standing.begin(2, "on: 2 filters");
        assert!(standing.text().starts_with("failing: "));
        stuck.over();
        assert_eq!(
            (standing.text().as_str(), stuck.due_us()),
            ("on: 2 filters", None)
        );
    }
}
