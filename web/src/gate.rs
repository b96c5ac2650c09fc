//! Who may come in, under which name, and what the log says of it.
//!
//! | started with | who comes in |
//! |---|---|
//! | neither (only on the loopback address) | everybody who can connect |
//! | `--tls-client-ca` | whoever has a certificate of that CA; without one the handshake fails |
//! | `--tokens` | whoever sends a token with each request (`Authorization: Bearer`), or sent it once to `/login` and has the cookie of that session |
//! | both | whoever has both |
//!
//! The cookie of a session is random. Browsers send it to this server alone (`__Host-`), only over TLS (`Secure`), and not with requests
//! that another site made (`SameSite=Strict`); scripts cannot read it (`HttpOnly`). The server keeps only its hash.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Redirect, Response};
use sha2::{Digest, Sha256};

use crate::api::Refusal;
use crate::connections::Peer;
use crate::page;
use crate::text::escape;
use crate::users::{Scope, User, Users, random};

/// Decides who comes in; remembers who is logged in, and what was logged.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    users: RwLock<Option<Users>>,
    sessions: Mutex<Sessions>,
    log: Mutex<Log>,
}

impl Gate {
    /// With tokens, or without.
    pub(crate) fn new(users: Option<Users>) -> Self {
        Self {
            users: RwLock::new(users),
            ..Self::default()
        }
    }

    /// From now on these users may come in. Users who are gone, or have another token or other rights now, are logged
    /// out; returns them.
    pub(crate) fn replace(&self, users: Users) -> Vec<User> {
        let mut now = self.users.write().unwrap_or_else(PoisonError::into_inner);
        let gone = now.as_ref().map(|before| before.missing_in(&users));
        let gone = gone.unwrap_or_default();
        let mut sessions = self.sessions();
        sessions.0.retain(|_, (user, _)| !gone.contains(user));
        *now = Some(users);
        gone
    }

    /// The user who asks; or the answer for somebody who may not come in.
    pub(crate) fn enter(
        &self,
        request: &Request,
        access: &mut Access,
    ) -> Result<User, Box<Response>> {
        let (path, headers) = (request.uri().path(), request.headers());
        let users = self.users.read().unwrap_or_else(PoisonError::into_inner);
        let Some(users) = &*users else {
            let name = peer(request).and_then(|peer| peer.certificate.clone());
            return Ok(User {
                name: name.unwrap_or_else(|| NOBODY.into()),
                scope: Scope::Everything,
            });
        };
        let by_token = bearer(headers).and_then(|token| users.of(token)).cloned();
        if path == LOGIN && request.method() == Method::POST {
            return Err(Box::new(match by_token {
                Some(user) => {
                    access.by(&user);
                    self.begin(&user)
                }
                None => unknown("this token is not known here"),
            }));
        }
        // A token that is wrong is not made good by a cookie.
        let user = match headers.contains_key(header::AUTHORIZATION) {
            true => by_token,
            false => cookie(headers).and_then(|id| self.sessions().user(id, Instant::now())),
        };
        let Some(user) = user else {
            let is_page = matches!(path, "/" | "/index.html" | "/now.html");
            return Err(Box::new(match page::public(path) {
                Some(file) => file,
                None if is_page => Redirect::to("/login.html").into_response(),
                None => unknown("this takes a token: Authorization: Bearer TOKEN, or log in at /"),
            }));
        };
        access.by(&user);
        if path == LOGOUT && request.method() == Method::POST {
            return Err(Box::new(self.end(headers)));
        }
        if !user.scope.has(path) {
            let refusal = Refusal::forbidden("this is not for the user of this token");
            return Err(Box::new(refusal.into_response()));
        }
        Ok(user)
    }

    /// Begins a session.
    fn begin(&self, user: &User) -> Response {
        let id = match random() {
            Ok(id) => id,
            Err(error) => {
                return Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error).into_response();
            }
        };
        self.sessions().add(&id, user.clone(), Instant::now());
        let life = SESSION.as_secs();
        let cookie =
            format!("{COOKIE}={id}; Path=/; Max-Age={life}; Secure; HttpOnly; SameSite=Strict");
        with_cookie(&cookie)
    }

    /// Ends the session of a cookie.
    fn end(&self, headers: &HeaderMap) -> Response {
        if let Some(id) = cookie(headers) {
            self.sessions().0.remove(&hash(id));
        }
        with_cookie(&format!(
            "{COOKIE}=; Path=/; Max-Age=0; Secure; HttpOnly; SameSite=Strict"
        ))
    }

    /// Logs who asked what, and how it was answered. What is asked again and again is logged once a minute, with a count.
    pub(crate) fn note(&self, told: &Access, status: StatusCode) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        for line in log.lines(told, status.as_u16(), Instant::now()) {
            log::info!(target: "access", "{line}");
        }
    }

    /// Whether anybody is known by name.
    pub(crate) fn has_tokens(&self) -> bool {
        let users = self.users.read().unwrap_or_else(PoisonError::into_inner);
        users.is_some()
    }

    fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An access, for the log.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    /// The user's name, and that of the certificate.
    name: String,
    address: Option<IpAddr>,
    method: String,
    path: String,
    query: String,
}

impl Access {
    /// What a request asks for. Its user is not known yet.
    pub(crate) fn of(request: &Request) -> Self {
        let peer = peer(request);
        let certificate = peer.and_then(|peer| peer.certificate.clone());
        Self {
            name: certificate.unwrap_or_else(|| NOBODY.into()),
            address: peer.map(|peer| peer.address.ip()),
            method: cut(request.method().as_str()),
            path: cut(request.uri().path()),
            query: cut(request.uri().query().unwrap_or_default()),
        }
    }

    /// It is this user's.
    fn by(&mut self, user: &User) {
        if self.name == NOBODY || self.name == user.name {
            self.name.clone_from(&user.name);
        } else {
            self.name = format!("{} ({})", user.name, self.name);
        }
    }

    fn line(&self, status: u16, more: u64) -> String {
        let address = self.address.map_or("?".into(), |it| it.to_string());
        let query = if self.query.is_empty() {
            String::new()
        } else {
            format!("?{}", self.query)
        };
        let more = match more {
            0 => String::new(),
            more => format!(", and {more} more since the last such line"),
        };
        let Self {
            name, method, path, ..
        } = self;
        format!("{name} from {address}: {method} {path}{query}: {status}{more}")
    }
}

/// As much of a text as the log shows.
fn cut(text: &str) -> String {
    let most = text.char_indices().nth(MOST_WRITTEN).map(|(at, _)| at);
    match most {
        None => escape(text),
        Some(at) => format!("{}…", escape(&text[..at])),
    }
}

/// What was logged lately, and how often the same came since.
#[derive(Debug, Default)]
struct Log(BTreeMap<Same, (Instant, Access, u64)>);

/// Name, address, path and status: requests in which all of these are equal are counted together. For refused requests
/// without a name the path does not matter.
type Same = (String, Option<IpAddr>, String, u16);

impl Log {
    fn lines(&mut self, told: &Access, status: u16, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        // What was counted is told, if nobody else came.
        self.0.retain(|(.., status), (since, access, more)| {
            let is_old = now.saturating_duration_since(*since) >= AGAIN;
            if is_old && *more > 0 {
                lines.push(access.line(*status, *more - 1));
            }
            !is_old
        });
        let is_polled = POLLED.contains(&told.path.as_str()) || status >= 400;
        let is_strangers = status >= 400 && told.name == NOBODY;
        let path = if is_strangers { "" } else { &told.path };
        let key = (told.name.clone(), told.address, path.to_owned(), status);
        let is_full = self.0.len() >= REMEMBERED;
        match self.0.get_mut(&key) {
            Some((_, access, more)) if is_polled => {
                *more += 1;
                access.clone_from(told);
            }
            // Strangers do not fill the log.
            None if is_strangers && is_full => {}
            _ => {
                lines.push(told.line(status, 0));
                // More than these are written each time.
                if is_polled && !is_full {
                    self.0.insert(key, (now, told.clone(), 0));
                }
            }
        }
        lines
    }
}

/// Who logged in: by the hash of what the cookie has, and until when.
#[derive(Debug, Default)]
struct Sessions(BTreeMap<[u8; 32], (User, Instant)>);

impl Sessions {
    fn user(&self, id: &str, now: Instant) -> Option<User> {
        let (user, until) = self.0.get(&hash(id))?;
        (now < *until).then(|| user.clone())
    }

    /// One more; of one user the oldest gives way.
    fn add(&mut self, id: &str, user: User, now: Instant) {
        self.0.retain(|_, (_, until)| now < *until);
        let own = self
            .0
            .iter()
            .filter(|(_, (other, _))| other.name == user.name);
        let own: Vec<(Instant, [u8; 32])> = own.map(|(id, (_, until))| (*until, *id)).collect();
        if own.len() >= SESSIONS
            && let Some((_, oldest)) = own.iter().min()
        {
            self.0.remove(oldest);
        }
        self.0.insert(hash(id), (user, now + SESSION));
    }
}

fn hash(id: &str) -> [u8; 32] {
    Sha256::digest(id).into()
}

fn peer(request: &Request) -> Option<&Peer> {
    request.extensions().get()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = text.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn cookie(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(header::COOKIE).iter();
    let mut pairs = cookies
        .filter_map(|it| it.to_str().ok())
        .flat_map(|it| it.split(';'));
    pairs.find_map(|pair| pair.trim().strip_prefix(COOKIE)?.strip_prefix('='))
}

fn with_cookie(cookie: &str) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    if let Ok(value) = HeaderValue::from_str(cookie) {
        response.headers_mut().insert(header::SET_COOKIE, value);
    }
    response
}

fn unknown(text: &str) -> Response {
    let refusal = Refusal::new(StatusCode::UNAUTHORIZED, text);
    ([(header::WWW_AUTHENTICATE, "Bearer")], refusal).into_response()
}

/// Says to the page who is logged in.
pub(crate) const USER: HeaderName = HeaderName::from_static("vnplug-user");
const LOGIN: &str = "/login";
const LOGOUT: &str = "/logout";
const NOBODY: &str = "-";
const COOKIE: &str = "__Host-vnplug";
/// How long a browser is logged in.
const SESSION: Duration = Duration::from_secs(12 * 3600);
/// Sessions of one user.
const SESSIONS: usize = 20;
/// What the pages ask for again and again.
const POLLED: [&str; 5] = [
    "/api/now",
    "/api/timeline",
    "/api/recordings",
    "/api/check",
    "/api/count",
];
/// After this time what is asked again and again is written again.
const AGAIN: Duration = Duration::from_secs(60);
/// The most characters of a method, a path and a query that are written.
const MOST_WRITTEN: usize = 200;
/// Accesses that are counted at a time.
const REMEMBERED: usize = 1000;

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;
    use crate::users::new_token;

    fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Body::empty()).unwrap()
    }

    fn status(gate: &Gate, request: &Request) -> u16 {
        match gate.enter(request, &mut Access::of(request)) {
            Ok(_) => 200,
            Err(response) => response.status().as_u16(),
        }
    }

    #[test]
    fn a_token_or_its_session_comes_in_and_nothing_else() {
        let (token, line) = new_token("alice").unwrap();
        let gate = Gate::new(Some(Users::parse(&line).unwrap()));
        let bearer = format!("bearer {token}");
        let get = |headers: &[(&str, &str)]| status(&gate, &request("GET", "/api/now", headers));
        assert_eq!(get(&[("authorization", &bearer)]), 200);
        let basic = format!("Basic {token}");
        for wrong in ["", "Bearer", "Bearer x", &basic, &token] {
            assert_eq!(get(&[("authorization", wrong)]), 401, "{wrong}");
        }
        assert_eq!(get(&[]), 401);
        assert_eq!(status(&gate, &request("GET", "/", &[])), 303);
        assert_eq!(status(&gate, &request("GET", "/page.js", &[])), 401);
        assert_eq!(status(&gate, &request("GET", "/login.js", &[])), 200);
        // Logged in: the cookie is as good, until it ends.
        let login = request("POST", "/login", &[("authorization", &bearer)]);
        let answer = gate.enter(&login, &mut Access::of(&login)).unwrap_err();
        assert_eq!(answer.status(), 204);
        let set = answer.headers()["set-cookie"].to_str().unwrap();
        for part in [
            "__Host-vnplug=",
            "; Secure",
            "; HttpOnly",
            "; SameSite=Strict",
            "; Path=/",
        ] {
            assert!(set.contains(part), "{set}");
        }
        let pair = set.split(';').next().unwrap();
        let cookies = format!("other=1; {pair}");
        assert_eq!(get(&[("cookie", &cookies)]), 200);
        assert_eq!(get(&[("cookie", &pair[..pair.len() - 1])]), 401);
        assert_eq!(get(&[("cookie", pair), ("authorization", "Bearer x")]), 401);
        let logout = request("POST", "/logout", &[("cookie", pair)]);
        assert_eq!(status(&gate, &logout), 204);
        assert_eq!(get(&[("cookie", pair)]), 401);
        // Without the token there is no session.
        assert_eq!(
            status(
                &gate,
                &request("POST", "/login", &[("authorization", "Bearer x")])
            ),
            401
        );
    }

    #[test]
    fn who_is_not_in_the_new_file_or_has_another_token_is_logged_out() {
        let lines = ["alice", "bob", "carol"].map(|name| new_token(name).unwrap());
        let all = lines.clone().map(|(_, line)| line).join("\n");
        let gate = Gate::new(Some(Users::parse(&all).unwrap()));
        let cookies = lines.clone().map(|(token, _)| {
            let bearer = format!("Bearer {token}");
            let login = request("POST", "/login", &[("authorization", &bearer)]);
            let answer = gate.enter(&login, &mut Access::of(&login)).unwrap_err();
            let set = answer.headers()["set-cookie"].to_str().unwrap();
            set.split(';').next().unwrap().to_owned()
        });
        let get =
            |cookie: &String| status(&gate, &request("GET", "/api/now", &[("cookie", cookie)]));
        assert_eq!(cookies.each_ref().map(get), [200; 3]);
        let (_, other) = new_token("bob").unwrap();
        let gone = gate.replace(Users::parse(&format!("{}\n{other}", lines[0].1)).unwrap());
        let gone: Vec<&str> = gone.iter().map(|user| user.name.as_str()).collect();
        assert_eq!(gone, ["bob", "carol"]);
        assert_eq!(cookies.each_ref().map(get), [200, 401, 401]);
    }

    #[test]
    fn sessions_end_and_one_user_has_few() {
        let user = |name: &str| User {
            name: name.into(),
            scope: Scope::Live,
        };
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        sessions.add("bob's", user("bob"), now);
        for n in 0..=SESSIONS {
            let at = now + Duration::from_secs(n as u64);
            sessions.add(&n.to_string(), user("alice"), at);
        }
        assert_eq!(sessions.user("0", now), None);
        assert_eq!(sessions.user("1", now), Some(user("alice")));
        assert_eq!(sessions.user("bob's", now), Some(user("bob")));
        assert_eq!(sessions.user("bob's", now + SESSION), None);
        sessions.add("new", user("carol"), now + 2 * SESSION);
        assert_eq!(sessions.0.len(), 1);
    }

    #[test]
    fn each_access_is_written_and_what_is_polled_is_counted() {
        let mut log = Log::default();
        let now = Instant::now();
        let access = |path: &str, name: &str| {
            let mut access = Access::of(&request("GET", path, &[]));
            access.name = name.into();
            access
        };
        let poll = access("/api/now", "alice");
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(
            log.lines(&poll, 200, at(0)),
            ["alice from ?: GET /api/now: 200"]
        );
        for second in 1..60 {
            assert!(log.lines(&poll, 200, at(second)).is_empty());
        }
        let load = access("/api/extract?filter=udp", "alice");
        for _ in 0..3 {
            let lines = log.lines(&load, 200, at(59));
            assert_eq!(lines, ["alice from ?: GET /api/extract?filter=udp: 200"]);
        }
        // Refusals, too, are counted; others' are their own.
        assert_eq!(log.lines(&access("/x", "-"), 401, at(59)).len(), 1);
        assert_eq!(log.lines(&access("/x", "-"), 401, at(59)).len(), 0);
        assert_eq!(log.lines(&access("/api/now", "bob"), 200, at(59)).len(), 1);
        let later = log.lines(&load, 200, at(60));
        assert_eq!(
            later[0],
            "alice from ?: GET /api/now: 200, and 58 more since the last such line"
        );
        for n in 0..5000 {
            let lines = log.lines(&access("/api/now", &n.to_string()), 200, at(70));
            assert_eq!(lines.len(), 1);
        }
        assert!(log.0.len() <= REMEMBERED);
    }
}
