//! The thread that loads operators' programs while the daemon runs, and opens what takes the same rights.
//!
//! It alone keeps `CAP_BPF` and `CAP_NET_ADMIN`, and only if the operator allows changes of programs. The kernel's verifier and
//! the translator may take a second, and a file as long as its disk likes, so neither is for the control thread.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use vnplug_os::event;
use vnplug_path::source::SourceError;

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
    /// Do something for a thread that waits.
    Do(Box<dyn FnOnce() + Send>),
}

/// What other threads have done here. By default there is nobody, and they do it themselves.
#[derive(Clone, Default)]
pub struct Errands(Option<Sender<Ask>>);

impl std::fmt::Debug for Errands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Errands").field(&self.are_done()).finish()
    }
}

impl Errands {
    /// Whether there is somebody.
    pub(crate) fn are_done(&self) -> bool {
        self.0.is_some()
    }

    /// Does this with all rights that there are. The calling thread waits, and is none that others wait for.
    ///
    /// # Errors
    /// [`SourceError`]: it panicked, which is a bug.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, SourceError> {
        let Some(asks) = &self.0 else {
            return Ok(work());
        };
        let (tell, hear) = channel();
        let errand = move || {
            // Who asked waits.
            let _ = tell.send(work());
        };
        // If the thread is gone, so is the errand, and with it what is heard.
        let _ = asks.send(Ask::Do(Box::new(errand)));
        hear.recv().map_err(|_| {
            SourceError::new("the thread that may do it failed, which is a bug: the log says where")
        })
    }
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

    /// For what else takes its rights.
    pub(crate) fn errands(&self) -> Errands {
        Errands(Some(self.asks.clone()))
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
            Ask::Do(errand) => {
                if catch_unwind(AssertUnwindSafe(errand)).is_err() {
                    log::error!(target: "source", "opening a source panicked, which is a bug in vnplugd");
                }
            }
        }
    }
}
