//! `/api/extract`: the packets of a selection as a file, written while they are found.
//!
//! A thread finds and encodes them; a short queue joins it with the connection. When the client is gone,
//! or takes nothing for [`STALLED`], the thread ends.

use std::io::{self, ErrorKind, Write};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderName, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use vnplug_store::extract::{Extract, Format, Output, Step};
use vnplug_store::name;

use crate::api::{Parameters, Refusal, open};
use crate::server::{DOWNLOADS, Site};

/// `/api/extract?from=&to=&filter=&format=`
pub(crate) async fn extract(
    State(shared): State<Arc<Site>>,
    uri: Uri,
) -> Result<Response, Refusal> {
    let parameters = Parameters::of(&uri, &["from", "to", "filter", "format"])?;
    let (range, filter) = (parameters.range()?, parameters.filter()?);
    let (format, extension) = match parameters.get("format") {
        None | Some("pcapng") => (Format::Pcapng, "pcapng"),
        Some("pcap") => (Format::Pcap, "pcap"),
        Some(_) => return Err(Refusal::bad("format is pcapng or pcap")),
    };
    let place = Arc::clone(&shared.downloads).try_acquire_owned();
    let place = place.map_err(|_| {
        let text = format!("{DOWNLOADS} downloads are running: wait until one ends");
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text)
    })?;
    let (queue, mut pieces) = channel(QUEUE);
    let whole = Arc::new(AtomicBool::new(false));
    let written = Arc::clone(&whole);
    let (opened, is_open) = tokio::sync::oneshot::channel();
    let runtime = Handle::current();
    tokio::task::spawn_blocking(move || {
        let _place = place;
        match open(&shared, range, &filter) {
            Ok(mut search) => {
                let unread = note(&shared, &mut search);
                // Nobody waits for it any more: the next thing that is sent says so.
                let _ = opened.send(Ok(unread));
                write(&mut search, format, Sink { queue, runtime }, &written);
                note(&shared, &mut search);
            }
            Err(refusal) => drop(opened.send(Err(refusal))),
        }
    });
    let unread = match is_open.await {
        Ok(opened) => opened?,
        Err(_) => {
            return Err(Refusal::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the search failed",
            ));
        }
    };
    // What goes wrong at once can still be said.
    let first = tokio::time::timeout(FIRST, pieces.recv()).await;
    let first = match first {
        Ok(Some(Err(error))) => return Err(Refusal::bad(error.to_string())),
        Ok(Some(Ok(piece))) => Some(piece),
        Ok(None) | Err(_) => None,
    };
    let pieces = Pieces {
        first,
        pieces,
        whole,
    };
    let began = range
        .0
        .map_or(String::new(), |ns| format!("-{}", &name::time(ns)[..15]));
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (
            header::CONTENT_DISPOSITION,
            format!("attachment; filename=\"vnplug{began}.{extension}\""),
        ),
        (UNREAD, unread.to_string()),
    ];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

/// Has the page tell what could not be read, and how much that was.
fn note(shared: &Site, search: &mut Extract) -> usize {
    let problems = search.problems();
    let mut damage = shared.damage.lock().unwrap_or_else(PoisonError::into_inner);
    for problem in &problems {
        log::warn!("{problem}");
        if damage.len() < MOST_DAMAGE {
            damage.insert(problem.path.clone(), problem.to_string());
        }
    }
    problems.len()
}

/// Writes what is found until the end, or until nobody takes it. `whole` is set at the end.
fn write(search: &mut Extract, format: Format, sink: Sink, whole: &AtomicBool) {
    let queue = sink.queue.clone();
    let runtime = sink.runtime.clone();
    let mut output = Output::new(sink, format);
    let written = loop {
        if queue.is_closed() {
            return;
        }
        match search.step() {
            Ok(Step::Packet(packet)) => {
                if let Err(error) = output.write(&packet) {
                    break Err(error);
                }
            }
            Ok(Step::Looking) => {}
            Ok(Step::End) => {
                let told = output.tell(search.losses());
                break told.and_then(|()| output.finish().map(drop));
            }
            Err(error) => break Err(io::Error::other(error.to_string())),
        }
    };
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        Err(error) => {
            log::warn!("a download ended: {error}");
            // The connection is cut, so that the file is not taken for whole.
            let _ = runtime.block_on(queue.send_timeout(Err(error), STALLED));
        }
        // The queue's last sender is dropped after this.
        Ok(()) => whole.store(true, Ordering::Release),
    }
}

type Piece = Result<Bytes, io::Error>;

/// Sends what is written to the connection.
struct Sink {
    queue: Sender<Piece>,
    runtime: Handle,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = Ok(Bytes::copy_from_slice(bytes));
        let sent = self.queue.send_timeout(piece, STALLED);
        let sent = self.runtime.block_on(sent);
        sent.map_err(|_| io::Error::from(ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The body of an answer.
struct Pieces {
    first: Option<Bytes>,
    pieces: Receiver<Piece>,
    /// The file came to its end.
    whole: Arc<AtomicBool>,
}

impl Stream for Pieces {
    type Item = Piece;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Piece>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(Ok(first))),
            None => match self.pieces.poll_recv(context) {
                // Its client took nothing for too long, or its thread died: the connection is cut.
                Poll::Ready(None) if !self.whole.swap(true, Ordering::Acquire) => {
                    Poll::Ready(Some(Err(ErrorKind::UnexpectedEof.into())))
                }
                ready => ready,
            },
        }
    }
}

/// How many files could not even be opened.
const UNREAD: HeaderName = HeaderName::from_static("vnplug-unread");
/// Of this many files it is told what is wrong with them.
const MOST_DAMAGE: usize = 20;
/// Pieces of up to 320 KiB that wait for the connection.
const QUEUE: usize = 4;
/// After this time a client that takes nothing is given up.
const STALLED: Duration = Duration::from_secs(60);
/// How long the answer waits for its first packet.
const FIRST: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls a body whose queue has one piece and then no sender any more.
    fn after_one_piece(whole: bool) -> Vec<Option<Piece>> {
        let (queue, pieces) = channel(QUEUE);
        queue.try_send(Ok(Bytes::from_static(b"a"))).unwrap();
        drop(queue);
        let mut body = Pieces {
            first: None,
            pieces,
            whole: Arc::new(AtomicBool::new(whole)),
        };
        let mut context = Context::from_waker(std::task::Waker::noop());
        (0..2)
            .map(|_| match Pin::new(&mut body).poll_next(&mut context) {
                Poll::Ready(piece) => piece,
                Poll::Pending => panic!("nobody can send any more"),
            })
            .collect()
    }

    #[test]
    fn a_file_that_did_not_come_to_its_end_does_not_end_as_if_it_had() {
        let mut cut = after_one_piece(false);
        let error = cut.pop().unwrap().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        assert!(after_one_piece(true).pop().unwrap().is_none());
    }
}
