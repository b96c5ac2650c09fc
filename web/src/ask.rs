//! Asks the daemon, once for all who want to know within a second.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as Lock, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use tokio::sync::Mutex;
use vnplug::{Client, Counted, Error};
use vnplug_ring::counters::label;

/// How long an answer is good for whoever else asks.
const FRESH: Duration = Duration::from_secs(1);
/// How long the daemon has for each of its answers; Prometheus waits for 10 s.
const PATIENCE: Duration = Duration::from_secs(4);

/// What the daemon answered.
#[derive(Debug)]
pub(crate) struct Told {
    /// Its name and version.
    pub(crate) server: String,
    pub(crate) counted: Vec<Counted>,
    pub(crate) took: Duration,
}

/// Makes of what was asked at this time what is said of it; a text is why there is no answer.
type Make = dyn FnMut(Instant, Result<Told, String>) -> Result<Bytes, String> + Send;

/// The daemon, and what was made of its last answer.
pub(crate) struct Asked {
    socket: PathBuf,
    make: Lock<Box<Make>>,
    last: Arc<Mutex<Option<(Instant, Bytes)>>>,
    is_silent: AtomicBool,
}

impl Asked {
    pub(crate) fn new(
        socket: PathBuf,
        make: impl FnMut(Instant, Result<Told, String>) -> Result<Bytes, String> + Send + 'static,
    ) -> Self {
        Self {
            socket,
            make: Lock::new(Box::new(make)),
            last: Arc::default(),
            is_silent: AtomicBool::new(false),
        }
    }

    /// What was made of it. Who comes while the daemon is asked waits for that answer, also if who asked has left.
    pub(crate) async fn answer(self: &Arc<Self>) -> Result<Bytes, String> {
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some((at, made)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(made.clone());
        }
        let own = Arc::clone(self);
        let ask = move || {
            let made = own.make()?;
            *last = Some((Instant::now(), made.clone()));
            Ok(made)
        };
        let asked = tokio::task::spawn_blocking(ask).await;
        asked.map_err(|error| error.to_string())?
    }

    fn make(&self) -> Result<Bytes, String> {
        let began = Instant::now();
        let told = self.ask().map_err(|error| error.to_string());
        // Not once a second.
        if self.is_silent.swap(told.is_err(), Ordering::Relaxed) != told.is_err() {
            let socket = self.socket.display();
            match &told {
                Ok(_) => log::warn!("the daemon answers again at {socket}"),
                Err(error) => log::warn!("the daemon does not answer at {socket}: {error}"),
            }
        }
        let told = told.map(|(server, counted)| Told {
            server,
            counted,
            took: began.elapsed(),
        });
        let mut make = self.make.lock().unwrap_or_else(PoisonError::into_inner);
        make(began, told)
    }

    fn ask(&self) -> Result<(String, Vec<Counted>), Error> {
        let mut client = Client::connect_to_within(&self.socket, PATIENCE)?;
        let mut counted = client.stats()?;
        if counted.iter().any(|it| label(it, "kind") == "switch") {
            let shown = client.show_switch("", 0, false)?;
            counted.extend(shown.into_iter().filter(|it| it.kind == "switch_port"));
        }
        Ok((client.server().to_owned(), counted))
    }
}

impl fmt::Debug for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asked")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}
