//! Asks the daemon, once for all who want to know within a second.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use tokio::sync::Mutex;
use vnplug::{Client, Error};

use super::families::{Told, text};

/// So long an answer is good for whoever else asks.
const FRESH: Duration = Duration::from_secs(1);
/// So long the daemon has for each of its answers; Prometheus waits for 10 s.
const PATIENCE: Duration = Duration::from_secs(4);

/// The daemon, and what it answered last.
#[derive(Debug)]
pub(super) struct Asked {
    socket: PathBuf,
    most: usize,
    last: Mutex<Option<(Instant, Bytes)>>,
}

impl Asked {
    pub(super) fn new(socket: PathBuf, most: usize) -> Self {
        Self {
            socket,
            most,
            last: Mutex::new(None),
        }
    }

    /// The metrics. Who comes while the daemon is asked waits for that answer.
    pub(super) async fn text(self: &Arc<Self>) -> Result<Bytes, String> {
        let mut last = self.last.lock().await;
        if let Some((at, text)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let own = Arc::clone(self);
        let made = tokio::task::spawn_blocking(move || own.make()).await;
        let text = made.map_err(|error| error.to_string())??;
        *last = Some((Instant::now(), text.clone()));
        Ok(text)
    }

    fn make(&self) -> Result<Bytes, String> {
        let began = Instant::now();
        let told = match self.ask() {
            Ok(counted) => Some(Told {
                counted,
                took: began.elapsed(),
            }),
            Err(error) => {
                log::warn!(
                    "the daemon does not answer at {}: {error}",
                    self.socket.display()
                );
                None
            }
        };
        let text = text(told.as_ref(), self.most);
        text.map(Bytes::from).map_err(|error| error.to_string())
    }

    fn ask(&self) -> Result<Vec<vnplug::Counted>, Error> {
        let mut client = Client::connect_to_within(&self.socket, PATIENCE)?;
        let mut counted = client.stats()?;
        let is_switch = |it: &vnplug::Counted| super::families::label(it, "kind") == "switch";
        if counted.iter().any(is_switch) {
            let shown = client.show_switch("", 0, false)?;
            counted.extend(shown.into_iter().filter(|it| it.kind == "switch_port"));
        }
        Ok(counted)
    }
}
