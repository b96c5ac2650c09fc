//! The thread that loads operators' programs while the daemon runs.
//!
//! It alone keeps `CAP_BPF` and `CAP_NET_ADMIN`, and only if the operator allows changes of programs. The kernel's verifier and
//! the translator may take a second, and a file as long as its disk likes, so neither is for the control thread.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use vnplug_os::event;

use super::exchange::{Made, Wish};

/// The thread, as the control thread sees it; it ends when this is dropped.
pub(crate) struct Maker {
    asks: Sender<Ask>,
    done: Receiver<Result<Vec<Made>, String>>,
}

enum Ask {
    /// Load all of them, or none; then ring.
    Load(Vec<Wish>, Arc<OwnedFd>),
    /// Free something: a program leaves a driver, and memory goes.
    Discard(Box<dyn Send>),
}

impl Maker {
    /// Starts the thread; `begin` is the first thing it does.
    pub(crate) fn start(begin: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (asks, asked) = channel();
        let (tell, done) = channel();
        std::thread::Builder::new()
            .name("vnplug-programs".into())
            .spawn(move || {
                begin();
                work(&asked, &tell);
            })?;
        Ok(Self { asks, done })
    }

    /// Has programs loaded; `bell` is rung when they are, or one cannot be.
    pub(crate) fn load(&self, wishes: Vec<Wish>, bell: &Arc<OwnedFd>) {
        // It is there as long as this.
        let _ = self.asks.send(Ask::Load(wishes, Arc::clone(bell)));
    }

    /// What was loaded, if it is done.
    pub(crate) fn next_done(&self) -> Option<Result<Vec<Made>, String>> {
        self.done.try_recv().ok()
    }

    /// Frees something there.
    pub(crate) fn discard(&self, what: impl Send + 'static) {
        let _ = self.asks.send(Ask::Discard(Box::new(what)));
    }
}

fn work(asked: &Receiver<Ask>, tell: &Sender<Result<Vec<Made>, String>>) {
    while let Ok(ask) = asked.recv() {
        match ask {
            Ask::Load(wishes, bell) => {
                let all = || wishes.iter().map(Wish::make).collect::<Result<Vec<_>, _>>();
                let made = catch_unwind(AssertUnwindSafe(all)).unwrap_or_else(|_| {
                    log::error!(target: "program", "loading a program panicked, which is a bug in vnplugd");
                    Err("the daemon failed to load it".into())
                });
                if tell.send(made).is_err() {
                    return;
                }
                event::ring(&bell);
            }
            Ask::Discard(what) => drop(what),
        }
    }
}
