//! TLS, tokens and clients' certificates: who shows nothing sees nothing, and nobody is kept waiting.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use vnplug_testing::eventually;

use crate::browser::Browser;
use crate::http::recording;
use crate::support::*;

const WEB: &str = env!("CARGO_BIN_EXE_vnplug-web");

/// A CA, certificates of it for the server and for a client, and tokens, made by openssl and by the program.
struct Team {
    dir: TestDir,
    alice: String,
    wall: String,
    disk: String,
}

impl Team {
    fn new() -> Self {
        let dir = TestDir::new("web-team");
        let run = |words: &str| openssl(&dir.0, words);
        let new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2";
        for ca in ["ca", "other"] {
            run(&format!(
                "{new} -keyout {ca}.key -out {ca}.pem -subj /CN={ca}"
            ));
        }
        let names = "subjectAltName=IP:127.0.0.1,DNS:localhost";
        let by = |ca: &str| {
            format!("{new} -CA {ca}.pem -CAkey {ca}.key -addext basicConstraints=critical,CA:FALSE")
        };
        run(&format!(
            "{} -keyout web.key -out web.pem -subj /CN=web -addext {names}",
            by("ca")
        ));
        run(&format!(
            "{} -keyout bob.key -out bob.pem -subj /CN=bob",
            by("ca")
        ));
        run(&format!(
            "{} -keyout eve.key -out eve.pem -subj /CN=eve",
            by("other")
        ));
        run(&format!(
            "{} -keyout new.key -out new.pem -subj /CN=web -addext {names}",
            by("other")
        ));
        let mut lines = String::new();
        let [alice, wall, disk] =
            [("alice", ""), ("wall", " live"), ("disk", " recordings")].map(|(name, scope)| {
                let output = Command::new(WEB)
                    .args(["--new-token", name])
                    // As `vnplug web` runs it.
                    .env("VNPLUG_SOCKET", "/nowhere")
                    .output()
                    .unwrap();
                let said = String::from_utf8(output.stderr).unwrap();
                let line = said.lines().find(|line| line.starts_with(name)).unwrap();
                lines += &format!("{line}{scope}\n");
                String::from_utf8(output.stdout).unwrap().trim().to_owned()
            });
        fs::write(dir.0.join("tokens"), lines).unwrap();
        for private in ["web.key", "tokens"] {
            fs::set_permissions(dir.0.join(private), fs::Permissions::from_mode(0o600)).unwrap();
        }
        Self {
            dir,
            alice,
            wall,
            disk,
        }
    }

    /// Another file has this name from now on.
    fn replace(&self, name: &str, text: &str) {
        let new = self.file("new");
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(new, self.file(name)).unwrap();
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.0.join(name)
    }

    /// The page of these recordings at this address, with further options whose values are files of the team.
    fn command(&self, listen: &str, place: &Path, options: &[(&str, &str)]) -> Command {
        let mut command = Command::new(WEB);
        command.args(["--listen", listen]).arg(place);
        command.arg("--socket").arg(self.file("nobody"));
        for (option, file) in options {
            command.arg(option).arg(self.file(file));
        }
        command
    }

    fn serve(&self, place: &Path, options: &[(&str, &str)]) -> Secure {
        let mut all = vec![("--tls-cert", "web.pem"), ("--tls-key", "web.key")];
        all.extend(options);
        // All addresses: the test comes by this machine's own.
        let mut command = self.command("0.0.0.0:0", place, &all);
        let log = self.file("log");
        command
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let port = line.trim().trim_end_matches('/').rsplit(':').next();
        let port = port.and_then(|port| port.parse().ok());
        assert!(line.starts_with("vnplug-web: https://"), "{line:?}");
        Secure {
            child,
            address: SocketAddr::from(([127, 0, 0, 1], port.unwrap())),
            ca: self.file("ca.pem"),
            log,
        }
    }
}

fn openssl(dir: &Path, words: &str) {
    let mut command = Command::new("openssl");
    command.args(words.split(' ')).current_dir(dir);
    let output = command
        .output()
        .expect("openssl, which ./setup.sh installs");
    assert!(output.status.success(), "{words}: {output:?}");
}

struct Secure {
    child: Child,
    address: SocketAddr,
    ca: PathBuf,
    log: PathBuf,
}

impl Secure {
    /// What curl gets: the status, 0 if there is no answer, and the body.
    fn curl(&self, path: &str, words: &[&str]) -> (u16, Vec<u8>) {
        let mut command = Command::new("curl");
        command.args(["-s", "--max-time", "60", "-w", "%{stderr}%{http_code}"]);
        command.arg("--cacert").arg(&self.ca).args(words);
        let output = command
            .arg(format!("https://{}{path}", self.address))
            .output()
            .unwrap();
        let status = String::from_utf8_lossy(&output.stderr).trim().parse();
        (status.unwrap_or(0), output.stdout)
    }

    fn with_token(&self, path: &str, token: &str) -> (u16, Vec<u8>) {
        self.curl(path, &["-H", &format!("Authorization: Bearer {token}")])
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }
}

impl Drop for Secure {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection that a client keeps, by openssl.
struct Kept {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    host: SocketAddr,
}

impl Kept {
    /// With these further options.
    fn open(server: &Secure, words: &[&str]) -> Self {
        let mut command = Command::new("openssl");
        command.args(["s_client", "-quiet", "-verify_quiet", "-connect"]);
        command.arg(server.address.to_string()).arg("-CAfile");
        let pipes = command.arg(&server.ca).args(words);
        let pipes = pipes.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = pipes.stderr(Stdio::null()).spawn().unwrap();
        Self {
            to: child.stdin.take().unwrap(),
            from: BufReader::new(child.stdout.take().unwrap()),
            host: server.address,
            child,
        }
    }

    /// The status of the next answer; `None` if the connection was cut.
    fn ask(&mut self, headers: &str) -> Option<u16> {
        let host = self.host;
        let request = format!("GET /api/recordings HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n");
        self.to.write_all(request.as_bytes()).ok()?;
        let answer = head(&mut self.from).ok()?;
        let len = answer.header("content-length").parse().unwrap();
        let mut body = vec![0; len];
        self.from.read_exact(&mut body).ok()?;
        Some(answer.status)
    }

    /// Waits until the server ends it, and says nothing meanwhile.
    fn await_end(&mut self) {
        let mut rest = Vec::new();
        self.from.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"");
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Everything that shows something.
const PATHS: [&str; 9] = [
    "/",
    "/index.html",
    "/now.html",
    "/page.js",
    "/api/now",
    "/api/recordings",
    "/api/timeline",
    "/api/count",
    "/api/extract",
];

#[test]
fn who_has_no_token_sees_nothing_and_who_has_one_what_it_is_for() {
    let (team, place) = (Team::new(), TestDir::new("web"));
    recording(&place);
    let server = team.serve(&place.0, &[("--tokens", "tokens")]);
    let wrong = format!("Bearer {}", &team.alice[1..]);
    for headers in [
        vec![],
        vec!["-H", "Authorization: Bearer"],
        vec!["-H", "Cookie: __Host-vnplug=x"],
    ] {
        for path in PATHS {
            let (status, body) = server.curl(path, &headers);
            assert!(matches!(status, 401 | 303), "{path}: {status}");
            let body = String::from_utf8_lossy(&body).into_owned();
            assert!(!body.contains("web-") && body.len() < 200, "{path}: {body}");
        }
    }
    let header = format!("Authorization: {wrong}");
    assert_eq!(server.curl("/api/recordings", &["-H", &header]).0, 401);
    assert_eq!(server.curl("/login", &["-X", "POST", "-H", &header]).0, 401);
    // Plain HTTP at this port has no answer, whatever it shows.
    let authorization = format!("Bearer {}", team.alice);
    let host = server.address.to_string();
    for path in PATHS {
        let headers = [("Host", host.as_str()), ("Authorization", &authorization)];
        let mut stream = begin(server.address, "GET", path, &headers, b"").unwrap();
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        assert!(bytes.len() < 16 && !bytes.starts_with(b"HTTP"), "{bytes:?}");
    }
    // From another machine, as `vnplug extract` would write it here.
    let query = "/api/extract?filter=udp+port+53";
    let (status, found) = server.with_token(query, &team.alice);
    assert_eq!(status, 200);
    assert_eq!(found, extracted(&[&place.0], 0, u64::MAX, "udp port 53"));
    for (token, statuses) in [
        (&team.alice, [200, 200]),
        (&team.wall, [200, 403]),
        (&team.disk, [403, 200]),
    ] {
        let is = ["/api/now", query].map(|path| server.with_token(path, token).0);
        assert_eq!(is, statuses);
    }
    // Each is in the log by name, and of strangers the first; tokens are not.
    let log = server.log();
    for line in [
        "alice from 127.0.0.1: GET /api/extract?filter=udp+port+53: 200",
        "wall from 127.0.0.1: GET /api/extract?filter=udp+port+53: 403",
        "- from 127.0.0.1: GET /page.js: 401",
    ] {
        assert!(log.contains(line), "no {line:?} in {log}");
    }
    assert!(
        !log.contains(&team.alice) && !log.contains(&team.alice[1..]),
        "{log}"
    );
}

#[test]
fn a_certificate_of_another_ca_or_none_is_no_connection() {
    let (team, place) = (Team::new(), TestDir::new("web"));
    recording(&place);
    let server = team.serve(&place.0, &[("--tls-client-ca", "ca.pem")]);
    let by = |name: &str| {
        let [pem, key] =
            ["pem", "key"].map(|kind| team.file(&format!("{name}.{kind}")).display().to_string());
        server.curl("/api/recordings", &["--cert", &pem, "--key", &key])
    };
    assert_eq!(server.curl("/api/recordings", &[]).0, 0);
    assert_eq!(by("eve").0, 0);
    assert_eq!(by("bob").0, 200);
    assert!(
        server
            .log()
            .contains("bob from 127.0.0.1: GET /api/recordings: 200"),
        "{}",
        server.log()
    );
    // With tokens too, both are asked for.
    let both = team.serve(
        &place.0,
        &[("--tls-client-ca", "ca.pem"), ("--tokens", "tokens")],
    );
    let [pem, key] = ["bob.pem", "bob.key"].map(|name| team.file(name).display().to_string());
    let bearer = format!("Authorization: Bearer {}", team.alice);
    let certificate = ["--cert", &pem, "--key", &key];
    assert_eq!(both.curl("/api/recordings", &certificate).0, 401);
    assert_eq!(both.curl("/api/recordings", &["-H", &bearer]).0, 0);
    let words = [&certificate[..], &["-H", &bearer]].concat();
    assert_eq!(both.curl("/api/recordings", &words).0, 200);
    assert!(both.log().contains("alice (bob) from"), "{}", both.log());
}

#[test]
fn files_that_change_are_read_again_and_wrong_ones_change_nothing() {
    let (team, place) = (Team::new(), TestDir::new("web"));
    recording(&place);
    let server = team.serve(&place.0, &[("--tokens", "tokens")]);
    let status = |token: &str| server.with_token("/api/recordings", token).0;
    assert_eq!([&team.alice, &team.disk].map(|it| status(it)), [200, 200]);
    // Half written: with these words the last one might see everything.
    let tokens = fs::read_to_string(team.file("tokens")).unwrap();
    team.replace("tokens", tokens.strip_suffix(" recordings\n").unwrap());
    eventually("it says what is wrong", || {
        server.log().contains("what was read before goes on")
    });
    assert_eq!([&team.alice, &team.disk].map(|it| status(it)), [200, 200]);
    // Alice is gone.
    let others: Vec<&str> = tokens
        .lines()
        .filter(|it| !it.starts_with("alice"))
        .collect();
    team.replace("tokens", &(others.join("\n") + "\n"));
    eventually("her token opens nothing", || status(&team.alice) == 401);
    assert_eq!(status(&team.disk), 200);
    // A new certificate and its key, by another CA: who trusts the old one alone does not take it.
    let read = |name: &str| fs::read_to_string(team.file(name)).unwrap();
    team.replace("web.key", &read("new.key"));
    team.replace("web.pem", &read("new.pem"));
    eventually("it has the new certificate", || status(&team.disk) == 0);
    let other = team.file("other.pem").display().to_string();
    let bearer = format!("Authorization: Bearer {}", team.disk);
    let words = ["--cacert", &other, "-H", &bearer];
    assert_eq!(server.curl("/api/recordings", &words).0, 200);
}

#[test]
fn who_has_a_token_no_more_is_cut_off_and_others_are_not() {
    let (team, place) = (Team::new(), TestDir::new("web"));
    recording(&place);
    let server = team.serve(&place.0, &[("--tokens", "tokens")]);
    let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let (alices, disks) = (bearer(&team.alice), bearer(&team.disk));
    let mut alice = Kept::open(&server, &[]);
    let mut disk = Kept::open(&server, &[]);
    let mut mute = Kept::open(&server, &[]);
    assert_eq!(alice.ask(&alices), Some(200));
    assert_eq!(disk.ask(&disks), Some(200));
    assert_eq!(mute.ask(""), Some(401));
    let tokens = fs::read_to_string(team.file("tokens")).unwrap();
    let others: Vec<&str> = tokens.lines().filter(|it| !it.starts_with("al")).collect();
    team.replace("tokens", &(others.join("\n") + "\n"));
    // Although it is idle. It would be for 30 seconds.
    let began = Instant::now();
    alice.await_end();
    println!("cut off after {:?}", began.elapsed());
    assert!(server.log().contains("connections that are cut: 1"));
    assert_eq!(disk.ask(&disks), Some(200));
    assert_eq!(mute.ask(&disks), Some(200));
}

#[test]
fn a_certificate_that_was_revoked_is_no_connection() {
    let (team, place) = (Team::new(), TestDir::new("web"));
    recording(&place);
    let client = |name: &str| {
        let [pem, key] = ["pem", "key"].map(|kind| team.file(&format!("{name}.{kind}")));
        [pem.display().to_string(), key.display().to_string()]
    };
    let certified = "-CA ca.pem -CAkey ca.key -addext basicConstraints=critical,CA:FALSE";
    let new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2";
    let carol = format!("{new} {certified} -keyout carol.key -out carol.pem -subj /CN=carol");
    openssl(&team.dir.0, &carol);
    // As long as lists of a large CA: more than a MiB.
    let line = |n: u128| {
        let serial = (1 << 126) + n;
        format!("R\t401231000000Z\t251231000000Z\t{serial:X}\tunknown\t/CN={n}\n")
    };
    let all: String = (1..=25_000).map(line).collect();
    fs::write(team.file("index.txt"), all).unwrap();
    fs::write(team.file("number"), "01\n").unwrap();
    let settings = "[ca]\ndefault_ca=ours\n[ours]\ndatabase=index.txt\ncrlnumber=number\n\
                    default_md=sha256\ndefault_crl_days=2\n";
    fs::write(team.file("ca.conf"), settings).unwrap();
    let by_ca = |words: &str| {
        let all = format!("ca -config ca.conf -keyfile ca.key -cert ca.pem {words}");
        openssl(&team.dir.0, &all);
    };
    by_ca("-gencrl -out revoked.pem");
    assert!(fs::metadata(team.file("revoked.pem")).unwrap().len() > 1 << 20);
    let server = team.serve(
        &place.0,
        &[
            ("--tls-client-ca", "ca.pem"),
            ("--tls-client-crl", "revoked.pem"),
        ],
    );
    let [bobs, carols] = ["bob", "carol"].map(client);
    let bob = || {
        let words = ["--cert", &bobs[0], "--key", &bobs[1]];
        server.curl("/api/recordings", &words).0
    };
    let kept = |own: &[String; 2]| Kept::open(&server, &["-cert", &own[0], "-key", &own[1]]);
    let (mut asks, mut idle, mut other) = (kept(&bobs), kept(&bobs), kept(&carols));
    assert_eq!(bob(), 200);
    for kept in [&mut asks, &mut idle, &mut other] {
        assert_eq!(kept.ask(""), Some(200));
    }
    by_ca("-revoke bob.pem");
    by_ca("-gencrl -out revoked.pem");
    // Who has a connection and goes on asking is cut off, too.
    let began = Instant::now();
    eventually("bob is cut off", || asks.ask("").is_none());
    println!("cut off after {:?}", began.elapsed());
    idle.await_end();
    assert_eq!(bob(), 0);
    assert_eq!(other.ask(""), Some(200));
}

#[test]
fn handshakes_that_do_not_go_on_keep_nobody_waiting() {
    let (team, place) = (Team::new(), TestDir::new("web"));
    recording(&place);
    let server = team.serve(&place.0, &[("--tokens", "tokens")]);
    let peer = |says: &[u8]| {
        let mut peer = TcpStream::connect(server.address).unwrap();
        // One that is cut meanwhile is no failure.
        let _ = peer.write_all(says);
        peer
    };
    // Silence, and the head of a record that never comes.
    let mute: Vec<_> = (0..100).map(|_| peer(b"")).collect();
    let half: Vec<_> = (0..150).map(|_| peer(&[22, 3, 1, 2, 0, 1, 0])).collect();
    assert_eq!(server.with_token("/api/recordings", &team.alice).0, 200);
    drop((mute, half));
    // One that trickles has a limit, although there is room.
    let mut slow = peer(&[22, 3, 1, 2, 0]);
    let began = Instant::now();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..100)
            .map(|n| {
                let token = if n % 2 == 0 {
                    team.alice.as_str()
                } else {
                    "wrong"
                };
                scope.spawn(|| server.with_token("/api/recordings", token).0)
            })
            .collect();
        let statuses: Vec<u16> = clients.into_iter().map(|it| it.join().unwrap()).collect();
        for (n, status) in statuses.into_iter().enumerate() {
            assert_eq!(status, if n % 2 == 0 { 200 } else { 401 });
        }
    });
    while slow.write_all(&[1]).is_ok() {
        assert!(began.elapsed() < Duration::from_secs(45), "it is held");
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn what_is_open_to_others_or_has_loose_files_is_not_started() {
    let (team, place) = (Team::new(), TestDir::new("web"));
    // The CA is right, its list is not.
    let list = "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n";
    fs::write(team.file("list.pem"), list).unwrap();
    let refused = |listen: &str, options: &[(&str, &str)]| {
        let output = team.command(listen, &place.0, options).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let tls = [("--tls-cert", "web.pem"), ("--tls-key", "web.key")];
    for options in [&[][..], &tls] {
        let said = refused("0.0.0.0:0", options);
        assert!(
            said.contains("--tokens") && said.contains("ssh -L"),
            "{said}"
        );
    }
    // Tokens over plain HTTP, also on this machine: every other page of it would have the cookie.
    assert!(refused("127.0.0.1:0", &[("--tokens", "tokens")]).contains("--tls-cert"));
    let mismatched = [("--tls-cert", "web.pem"), ("--tls-key", "bob.key")];
    fs::set_permissions(team.file("bob.key"), fs::Permissions::from_mode(0o600)).unwrap();
    assert!(refused("127.0.0.1:0", &mismatched).contains("bob.key"));
    let with = |more: (&'static str, &'static str)| [tls[0], tls[1], more];
    assert!(refused("127.0.0.1:0", &with(("--tokens", "web.pem"))).contains("others read"));
    assert!(
        refused("127.0.0.1:0", &with(("--tls-client-ca", "tokens"))).contains("no certificate")
    );
    for (list, why) in [
        ("list.pem", "list.pem: provided CRL could not"),
        ("web.pem", "web.pem: there is no list"),
    ] {
        let options = [
            tls[0],
            tls[1],
            ("--tls-client-ca", "ca.pem"),
            ("--tls-client-crl", list),
        ];
        let said = refused("127.0.0.1:0", &options);
        assert!(said.contains(why) && !said.contains("ca.pem"), "{said}");
    }
    fs::set_permissions(team.file("web.key"), fs::Permissions::from_mode(0o644)).unwrap();
    let said = refused("127.0.0.1:0", &tls);
    assert!(
        said.contains("mode 644") && said.contains("chmod 640"),
        "{said}"
    );
}

#[test]
fn a_browser_logs_in_and_out() {
    let (team, place) = (Team::new(), TestDir::new("web"));
    recording(&place);
    let server = team.serve(&place.0, &[("--tokens", "tokens")]);
    let browser = Browser::open(1000, 700, false);
    browser.go(&format!("https://{}/", server.address));
    let at = || browser.run("return location.pathname");
    assert_eq!(at(), "/login.html");
    browser.write("token", "wrong");
    browser.run("document.querySelector('#form button').click()");
    eventually("it says so", || browser.text("error").contains("not known"));
    browser.screenshot("login");
    browser.write("token", &team.alice);
    browser.run("document.querySelector('#form button').click()");
    eventually("the recordings are there", || {
        at() == "/" && !browser.data("summary", "packets").is_null()
    });
    browser.expect("summary", "packets", 1001);
    assert_eq!(browser.text("user"), "alice Log out");
    assert_eq!(browser.run("return document.cookie"), "");
    browser.screenshot("logged-in");
    browser.run("document.querySelector('#user button').click()");
    eventually("it is out", || at() == "/login.html");
    browser.go(&format!("https://{}/now.html", server.address));
    assert_eq!(at(), "/login.html");
    assert!(
        server
            .log()
            .contains("alice from 127.0.0.1: POST /login: 204"),
        "{}",
        server.log()
    );
}
