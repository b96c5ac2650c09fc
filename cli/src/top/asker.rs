//! Asks the daemon in a thread of its own, so that keys work while it does not answer.

use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use vnplug::{Client, Counted, Error};

use crate::failure::Failure;

/// What was heard.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) at: Instant,
    /// The daemon's name and version, and its counters; or why there are none.
    pub(super) told: Result<(String, Vec<Counted>), String>,
}

/// How long the daemon has to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Asks as often as this; it ends with who listens.
pub(super) fn start(socket: &Path, every: Duration) -> Receiver<Answer> {
    // One that is not drawn yet keeps the next one back.
    let (tell, heard) = sync_channel(1);
    let socket = socket.to_owned();
    thread::spawn(move || {
        let mut client = None;
        loop {
            let began = Instant::now();
            let told = ask(&mut client, &socket);
            if told.is_err() {
                client = None;
            }
            let told = told.map_err(|error| Failure::from(error).line());
            if tell.send(Answer { at: began, told }).is_err() {
                return;
            }
            thread::sleep(every.saturating_sub(began.elapsed()));
        }
    });
    heard
}

fn ask(client: &mut Option<Client>, socket: &Path) -> Result<(String, Vec<Counted>), Error> {
    let client = match client {
        Some(client) => client,
        None => client.insert(Client::connect_to_within(socket, PATIENCE)?),
    };
    let counted = client.stats()?;
    Ok((client.server().to_owned(), counted))
}
