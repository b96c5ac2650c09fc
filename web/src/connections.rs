//! Connections: how many there are, and which one gives way to the next; TLS, if there is some.
//!
//! A connection waits for its client (for a request, or for an answer to be read), or it works. A request
//! has to be there whole after [`HEAD`], trickled or not. At most [`CONNECTIONS`] are held; when one more
//! comes, the one that has waited longest for its client is cut, but none that has waited for less than
//! [`GRACE`]. So a client that opens connections and sends nothing shuts out itself, not others. Where all
//! work, the next one waits in the kernel's queue. A TLS handshake is waiting for the client, and ends after [`HANDSHAKE`].

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, body};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_rustls::rustls::pki_types::CertificateDer;

use crate::certificate;
use crate::trust::Tls;
use crate::users::User;

/// Connections at a time.
pub(crate) const CONNECTIONS: usize = 128;
/// A request's head comes within this time, also the next one of a connection that is kept.
pub(crate) const HEAD: Duration = Duration::from_secs(30);

/// A TLS handshake is done within this time.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Every client has this time, however many others come.
const GRACE: Duration = Duration::from_millis(200);

/// Who is at the other end; every request has it among its extensions.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    /// The name in its certificate, which was verified.
    pub(crate) certificate: Option<String>,
    connection: Arc<Connected>,
}

impl Peer {
    /// It is this user who asks.
    pub(crate) fn is(&self, user: &User) {
        self.connection.who().user = Some(user.clone());
    }
}

/// What let a connection come in.
#[derive(Debug, Default)]
pub(crate) struct Who {
    /// The client's certificate and those that it showed with it, when the handshake is done.
    pub(crate) certificates: Option<Vec<CertificateDer<'static>>>,
    /// Who asked last.
    pub(crate) user: Option<User>,
}

/// Serves until the process ends; `head` and `most` are [`HEAD`] and [`CONNECTIONS`].
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<Tls>,
    table: Arc<Table>,
    routes: Router,
    (head, most): (Duration, usize),
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head);
    loop {
        table.room(most).await;
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                log::warn!("no connection can be accepted: {error}");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
        };
        keep_alive(&stream);
        let held = table.enter();
        let (http, routes) = (http.clone(), routes.clone());
        let tls = tls.clone();
        tokio::spawn(async move {
            let slot = Arc::clone(&held.slot);
            let connection = Connection { stream, slot };
            tokio::select! {
                () = speak(http, connection, address, tls, routes) => {}
                () = held.slot.cut.notified() => {}
            }
        });
    }
}

/// Serves one connection. What a client breaks off is its own affair.
async fn speak(
    http: http1::Builder,
    connection: Connection,
    address: SocketAddr,
    tls: Option<Tls>,
    routes: Router,
) {
    let slot = Arc::clone(&connection.slot);
    let mut peer = Peer {
        address,
        certificate: None,
        connection: Arc::clone(&slot),
    };
    let Some(tls) = tls else {
        let _ = http
            .serve_connection(TokioIo::new(connection), service(slot, peer, routes))
            .await;
        return;
    };
    let current = || tls.read().unwrap_or_else(PoisonError::into_inner).clone();
    let handshake = current().acceptor.accept(connection);
    let stream = match tokio::time::timeout(HANDSHAKE, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return log::info!("{}: no TLS: {error}", address.ip()),
        Err(_) => return log::info!("{}: no TLS within {HANDSHAKE:?}", address.ip()),
    };
    let certificates = stream.get_ref().1.peer_certificates();
    let certificates = certificates.unwrap_or_default();
    peer.certificate = certificates.first().map(|it| certificate::name(it));
    let owned = certificates.iter().map(|it| it.clone().into_owned());
    slot.who().certificates = Some(owned.collect());
    // Others may be taken than when it began.
    if !current().takes(certificates) {
        return log::info!("{}: its certificate is taken no more", address.ip());
    }
    let _ = http
        .serve_connection(TokioIo::new(stream), service(slot, peer, routes))
        .await;
}

/// What answers the requests of a connection.
fn service(
    slot: Arc<Connected>,
    peer: Peer,
    routes: Router,
) -> impl Service<Request<Incoming>, Response = hyper::Response<Answer>, Error = Infallible, Future: Send>
{
    let routes = TowerToHyperService::new(routes);
    service_fn(move |mut request: Request<Incoming>| {
        let working = Working::new(&slot);
        request.extensions_mut().insert(peer.clone());
        let answer = routes.call(request);
        async move {
            let Ok(response) = answer.await;
            Ok::<_, Infallible>(response.map(|body| Answer { body, working }))
        }
    })
}

/// All connections, by number.
#[derive(Debug, Default)]
pub(crate) struct Table {
    slots: Mutex<BTreeMap<u64, Arc<Connected>>>,
    /// Somebody left, or began to wait for its client.
    changed: Notify,
}

/// One connection.
#[derive(Debug)]
struct Connected {
    /// Since when it waits for its client; `None` while it works.
    waits: Mutex<Option<Instant>>,
    cut: Notify,
    who: Mutex<Who>,
    table: Arc<Table>,
}

/// A place in the table, for as long as the connection lives.
#[derive(Debug)]
struct Held {
    number: u64,
    slot: Arc<Connected>,
}

impl Table {
    /// Waits until one more connection fits in, and cuts the one that waited longest for its client.
    async fn room(&self, most: usize) {
        while let Some(patience) = self.cut_one(most) {
            // Whichever is first.
            let _ = tokio::time::timeout(patience, self.changed.notified()).await;
        }
    }

    /// `None` if there is room now, else when to look again.
    fn cut_one(&self, most: usize) -> Option<Duration> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() < most {
            return None;
        }
        let waiting = slots.iter().filter_map(|(number, slot)| {
            let since = *slot.waits.lock().unwrap_or_else(PoisonError::into_inner);
            since.map(|since| (since, *number))
        });
        let Some((since, number)) = waiting.min() else {
            return Some(GRACE);
        };
        let patience = GRACE.saturating_sub(since.elapsed());
        if !patience.is_zero() {
            return Some(patience);
        }
        if let Some(slot) = slots.remove(&number) {
            slot.cut.notify_one();
        }
        None
    }

    /// Cuts the connections of those, whatever they do; how many there are.
    pub(crate) fn cut_those(&self, are: impl Fn(&Who) -> bool) -> usize {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let before = slots.len();
        slots.retain(|_, slot| {
            let is_one = are(&slot.who());
            if is_one {
                slot.cut.notify_one();
            }
            !is_one
        });
        self.changed.notify_one();
        before - slots.len()
    }

    fn enter(self: &Arc<Self>) -> Held {
        let slot = Arc::new(Connected {
            waits: Mutex::new(Some(Instant::now())),
            cut: Notify::new(),
            who: Mutex::default(),
            table: Arc::clone(self),
        });
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let number = slots.last_key_value().map_or(0, |(last, _)| last + 1);
        slots.insert(number, Arc::clone(&slot));
        Held { number, slot }
    }
}

impl Connected {
    fn who(&self) -> MutexGuard<'_, Who> {
        self.who.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on it waits for its client, or no longer.
    fn wait(&self, waits: bool) {
        let mut since = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        if !waits {
            *since = None;
        } else if since.is_none() {
            *since = Some(Instant::now());
            self.table.changed.notify_one();
        }
    }

    /// Its client took something.
    fn moved(&self) {
        let mut since = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        if since.is_some() {
            *since = Some(Instant::now());
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let table = &self.slot.table;
        let mut slots = table.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // It was removed already if it was cut, and its number may be another's by now.
        if slots
            .get(&self.number)
            .is_some_and(|slot| Arc::ptr_eq(slot, &self.slot))
        {
            slots.remove(&self.number);
            table.changed.notify_one();
        }
    }
}

/// From a request to the end of its answer.
#[derive(Debug)]
struct Working(Arc<Connected>);

impl Working {
    fn new(slot: &Arc<Connected>) -> Self {
        slot.wait(false);
        Self(Arc::clone(slot))
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.wait(true);
    }
}

/// An answer, with what says that its connection works.
#[derive(Debug)]
struct Answer {
    body: Body,
    working: Working,
}

impl body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        // Whoever asks for more of it has sent what it had.
        self.working.0.wait(false);
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection's bytes. It waits for its client while nothing can be written.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    slot: Arc<Connected>,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        match written {
            Poll::Pending => self.slot.wait(true),
            Poll::Ready(_) => self.slot.moved(),
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// A peer that is gone without a word is noticed by the kernel.
fn keep_alive(stream: &TcpStream) {
    let kept = set_socket_keepalive(stream, true)
        .and_then(|()| set_tcp_keepidle(stream, KEEP_IDLE))
        .and_then(|()| set_tcp_keepintvl(stream, KEEP_EVERY))
        .and_then(|()| set_tcp_keepcnt(stream, KEEP_TRIES));
    if let Err(error) = kept {
        log::warn!("a peer that is gone will not be noticed: {error}");
    }
}

/// When a silent peer is asked whether it is there, how long after that again, and how often.
const KEEP_IDLE: Duration = Duration::from_secs(60);
const KEEP_EVERY: Duration = Duration::from_secs(15);
const KEEP_TRIES: u32 = 4;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, SocketAddr, TcpStream as Peer};
    use std::thread;

    use axum::routing::get;

    use super::*;

    /// A server with one page, in a thread that ends with the process.
    fn server(head: Duration, most: usize) -> SocketAddr {
        server_with(head, most).0
    }

    fn server_with(head: Duration, most: usize) -> (SocketAddr, Arc<Table>) {
        let connections = Arc::new(Table::default());
        let table = Arc::clone(&connections);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let routes = Router::new()
                    .route("/", get(async || "the page"))
                    .route("/large", get(async || vec![7_u8; 64 << 20]));
                serve(listener, None, table, routes, (head, most)).await;
            });
        });
        (address, connections)
    }

    fn peer(address: SocketAddr, says: &str) -> Peer {
        let mut peer = Peer::connect(address).unwrap();
        let limit = Some(Duration::from_secs(60));
        peer.set_read_timeout(limit).unwrap();
        peer.write_all(says.as_bytes()).unwrap();
        peer
    }

    /// What is read until the server ends the connection.
    fn rest(mut peer: Peer) -> String {
        let mut bytes = Vec::new();
        // One that was cut may end by a reset.
        let _ = peer.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    const ASK: &str = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    const LAST: &str = "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

    #[test]
    fn a_request_that_is_not_whole_in_time_ends_its_connection() {
        let address = server(Duration::from_millis(300), 8);
        assert_eq!(rest(peer(address, "")), "");
        let half = rest(peer(address, "GET / HT"));
        assert!(!half.contains("the page"), "{half}");
        // Silence after an answer, too.
        let kept = rest(peer(address, ASK));
        assert!(kept.ends_with("the page"), "{kept}");
        // Bytes that trickle in win no time.
        let mut slow = peer(address, "G");
        let began = Instant::now();
        while slow.write_all(b"E").is_ok() {
            assert!(began.elapsed() < Duration::from_secs(30), "it is held");
            thread::sleep(Duration::from_millis(50));
        }
    }

    #[test]
    fn who_waits_longest_gives_way() {
        let address = server(Duration::MAX / 4, 8);
        let kept: Vec<_> = (0..8).map(|_| peer(address, ASK)).collect();
        let half: Vec<_> = (0..20).map(|_| peer(address, "GET / HT")).collect();
        assert!(rest(peer(address, LAST)).ends_with("the page"));
        for peer in kept {
            assert!(rest(peer).ends_with("the page"), "cut, but answered before");
        }
        drop(half);
    }

    #[test]
    fn whoever_may_not_come_in_any_more_is_cut_off_in_the_middle_of_an_answer() {
        let (address, table) = server_with(Duration::MAX / 4, 8);
        let stuck = peer(address, "GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let mut first = [0; 1];
        stuck.peek(&mut first).unwrap();
        assert_eq!(table.cut_those(|_| false), 0);
        assert_eq!(table.cut_those(|who| who.user.is_none()), 1);
        assert!(rest(stuck).len() < 64 << 20);
        assert!(rest(peer(address, LAST)).ends_with("the page"));
    }

    #[test]
    fn an_answer_that_nobody_reads_gives_way_and_one_that_is_read_does_not() {
        let address = server(Duration::MAX / 4, 2);
        let ask = "GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        let stuck = peer(address, ask);
        let mut first = [0; 1];
        stuck.peek(&mut first).unwrap();
        let reader = peer(address, ask);
        let whole = thread::spawn(move || {
            let mut reader = reader;
            let mut bytes = vec![0; 1 << 20];
            let mut read = 0;
            while let Ok(got @ 1..) = reader.read(&mut bytes) {
                read += got;
            }
            read
        });
        assert!(rest(peer(address, LAST)).ends_with("the page"));
        assert!(whole.join().unwrap() > 64 << 20);
        let _ = stuck.shutdown(Shutdown::Both);
    }
}
