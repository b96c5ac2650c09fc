//! `vnplug sandbox` with programs that nobody here wrote: one question per rule, and what is not answered in time
//! is denied, with the program's own error and without a frame.
//!
//! ```text
//!   a user's programs ── wire0 ═══ wire1 ── their servers        two namespaces; wire1 is captured
//! ```
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::Value;
use vnplug::{Next, Port};
use vnplug_e2e::asking::{self, Asked, Asking, Reply};
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::secure::{FETCH_BY_QUIC, PAGE, quic_server};
use vnplug_e2e::station::Running;
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::eventually;

const SERVER: &str = "203.0.113.2";
const URL: &str = "http://203.0.113.2:8000/page.html";

/// Two ends of a wire, and what passes it.
struct Place {
    lab: Lab,
    near: Netns,
    far: Netns,
    // The port reads what the daemon writes.
    _daemon: Daemon,
    at_server: RefCell<Port>,
    servers: RefCell<Vec<Running>>,
}

impl Place {
    fn new() -> Self {
        let (lab, near, far) = (
            Lab::new().unwrap(),
            Netns::new().unwrap(),
            Netns::new().unwrap(),
        );
        let peer = ["type", "veth", "peer", "name", "wire1", "netns", far.name()];
        near.ip(&[&["link", "add", "wire0"], &peer[..]].concat())
            .unwrap();
        for (end, interface, last) in [(&near, "wire0", 1), (&far, "wire1", 2)] {
            let address = format!("203.0.113.{last}/24");
            end.ip(&["addr", "add", &address, "dev", interface])
                .unwrap();
            end.ip(&["link", "set", interface, "up"]).unwrap();
        }
        // As on any desktop.
        let ping = || fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647");
        near.enter(ping).unwrap().unwrap();
        let daemon = Daemon::start(&lab, Some(&far), &["--source", "wire1"]).unwrap();
        let at_server = daemon
            .port("host:wire1")
            .filter("ip or arp")
            .open()
            .unwrap();
        Self {
            lab,
            near,
            far,
            _daemon: daemon,
            at_server: RefCell::new(at_server),
            servers: RefCell::default(),
        }
    }

    /// How many frames were on the wire since the last look.
    fn frames(&self) -> usize {
        thread::sleep(Duration::from_millis(50));
        let mut count = 0;
        while let Next::Packet(_) = self.at_server.borrow_mut().next().unwrap() {
            count += 1;
        }
        count
    }

    /// Starts a server, and waits until it listens: `listens` is what ss(8) shows of it.
    fn serve(&self, words: &[&str], listens: &str) {
        let mut command = self.far.command(words[0]);
        command.args(&words[1..]);
        self.serve_by(command, words[0], listens);
    }

    fn serve_by(&self, command: Command, name: &str, listens: &str) {
        let mut server = Running::start(command, &self.lab, name).unwrap();
        eventually(&format!("{name} listens"), || {
            assert!(server.status().is_none(), "{name}: {}", server.errors());
            let sockets = self.far.exec(&["ss", "-lntuH"]).unwrap();
            sockets.contains(listens)
        });
        self.servers.borrow_mut().push(server);
    }

    /// A directory that everybody reads.
    fn directory(&self, name: &str) -> String {
        let path = self.lab.dir().join(name);
        fs::create_dir(&path).unwrap();
        path.display().to_string()
    }

    fn serve_pages(&self) {
        let pages = self.directory("pages");
        let page = "<title>a page</title><link rel=stylesheet href=style.css>\
                    <script src=script.js></script><body>seen without a script</body>";
        fs::write(format!("{pages}/page.html"), page).unwrap();
        fs::write(format!("{pages}/style.css"), "body { color: red }").unwrap();
        let script = "addEventListener('load', () => { document.body.textContent = \
                      getComputedStyle(document.body).color; })";
        fs::write(format!("{pages}/script.js"), script).unwrap();
        self.serve(
            &["busybox", "httpd", "-f", "-p", "8000", "-h", &pages],
            ":8000",
        );
    }

    fn serve_names(&self) {
        let words = [
            "dnsmasq",
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--no-resolv",
            "--no-hosts",
            "--bind-interfaces",
            "--listen-address=203.0.113.2",
            "--pid-file=",
            "--address=/web.test/203.0.113.2",
        ];
        self.serve(&words, "203.0.113.2:53");
    }

    /// A user's program that asks, with these options, in the user's home of this name.
    fn start(&self, name: &str, options: &[&str], words: &[&str]) -> Asking {
        let home = format!("home-{name}");
        let home = match self.lab.dir().join(&home) {
            there if there.exists() => there,
            _ => asking::home(&self.lab, &home).unwrap(),
        };
        let vnplug = Command::new(program("vnplug").unwrap());
        let options = [&["--dns", SERVER, "--default", "ask"], options].concat();
        let place = (&self.lab, Some(&self.near), name);
        Asking::start(vnplug, place, &home, &options, words).unwrap()
    }

    /// Runs a user's program, and answers.
    fn run(&self, name: &str, words: &[&str], reply: impl FnMut(&Value) -> Option<Reply>) -> Asked {
        self.start(name, &["--timeout", "60s"], words)
            .finish(reply)
            .unwrap()
    }

    /// Runs a user's program that nobody answers: its questions are settled by time, no frame is on the wire, and
    /// the program says `error`. To be called before anybody is allowed, whose neighbours are looked for later.
    fn denied(&self, name: &str, words: &[&str], error: &str) -> Asked {
        self.denied_but(name, words, error, |_| None)
    }

    /// The same, with an answer to some questions.
    fn denied_but(
        &self,
        name: &str,
        words: &[&str],
        error: &str,
        reply: impl FnMut(&Value) -> Option<Reply>,
    ) -> Asked {
        let sandbox = self.start(name, &["--timeout", "400ms"], words);
        let asked = sandbox.finish(reply).unwrap();
        let said = asked.output.clone() + &asked.errors;
        for words in ["nobody answered in time", error] {
            assert!(said.contains(words), "{words:?} is not said: {asked:#?}");
        }
        assert_eq!(self.frames(), 0, "{asked:#?}");
        asked
    }
}

/// Yes, for this session, to the rule with this number.
fn session(offer: usize) -> Option<Reply> {
    reply("allow", offer)
}

fn reply(say: &'static str, offer: usize) -> Option<Reply> {
    Some(Reply {
        say,
        life: "session",
        offer,
    })
}

fn split(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

#[test]
fn curl_asks_for_a_name_once_and_its_connections_are_covered() {
    let place = Place::new();
    place.serve_pages();
    place.serve_names();
    let url = "http://web.test:8000/page.html";
    place.denied("late", &["curl", "-sS", url], "Could not resolve host");
    place.denied("number", &["curl", "-sS", URL], "Failed to connect");
    let twice = ["sh", "-c", &format!("curl -s {url} && curl -s {url} {url}")];
    let asked = place.run("twice", &twice, |_| session(0));
    assert_eq!(asked.asked(), ["curl resolve udp web.test"], "{asked:#?}");
    assert_eq!(asked.output.matches("a page").count(), 3, "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn dig_is_answered_where_it_was_allowed_to_ask() {
    let place = Place::new();
    place.serve_names();
    // By the server that /etc/resolv.conf names, and by one of its own choice.
    let name = split("dig +tries=1 web.test");
    let server = split("dig +tries=1 @203.0.113.2 web.test web.test");
    place.denied("name-late", &name, "status: REFUSED");
    place.denied("server-late", &server, "failed: permission denied");
    let asked = place.run("name", &name, |_| session(0));
    assert_eq!(asked.asked(), ["dig resolve udp web.test"], "{asked:#?}");
    assert!(asked.output.contains(ANSWER), "{asked:#?}");
    let asked = place.run("server", &server, |_| session(0));
    let once = ["dig connect udp 203.0.113.2:53"];
    assert_eq!(asked.asked(), once, "{asked:#?}");
    assert_eq!(asked.output.matches(ANSWER).count(), 2, "{asked:#?}");
    assert!(place.frames() > 0);
}

const ANSWER: &str = "A\t203.0.113.2";

#[test]
fn ping_asks_for_its_look_at_the_route_and_for_its_packets_or_for_the_address() {
    let place = Place::new();
    let words = split("ping -n -c 2 -i 0.2 -W 1 203.0.113.2");
    // So it explains EACCES.
    place.denied("late", &words, "Do you want to ping broadcast?");
    let asked = place.run("each", &words, |_| session(0));
    let each =
        ["udp 203.0.113.2:1025", "icmp 203.0.113.2:0"].map(|to| format!("ping connect {to}"));
    assert_eq!(asked.asked(), each, "{asked:#?}");
    assert!(asked.output.contains("2 received"), "{asked:#?}");
    let asked = place.run("address", &words, |_| session(1));
    assert_eq!(asked.questions.len(), 1, "{asked:#?}");
    assert!(asked.output.contains("2 received"), "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn netcat_speaks_udp_with_one_that_was_allowed() {
    let place = Place::new();
    let at: SocketAddr = "203.0.113.2:9000".parse().unwrap();
    let echo = place.far.enter(|| UdpSocket::bind(at)).unwrap().unwrap();
    thread::spawn(move || {
        let mut bytes = [0; 99];
        while let Ok((length, from)) = echo.recv_from(&mut bytes) {
            // Nobody can be gone: it is UDP.
            let _ = echo.send_to(&bytes[..length], from);
        }
    });
    // In several pieces, and what the sandbox says comes between them.
    let error = "Permission denied";
    place.denied("late", &split("nc -v -u 203.0.113.2 9000"), error);
    let script = "echo an echo | nc -u -W 1 -w 5 203.0.113.2 9000";
    let asked = place.run("echo", &["sh", "-c", script], |_| session(0));
    let once = ["nc.openbsd connect udp 203.0.113.2:9000"];
    assert_eq!(asked.asked(), once, "{asked:#?}");
    assert!(asked.output.contains("an echo"), "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn nmap_asks_for_each_port_or_once_for_the_machine() {
    let place = Place::new();
    place.serve_pages();
    let scan = |ports| {
        split("nmap -n -Pn -sT --max-retries 0 203.0.113.2 -p")
            .into_iter()
            .chain([ports])
            .collect::<Vec<_>>()
    };
    place.denied("late", &scan("8000"), "8000/tcp filtered");
    let asked = place.run("machine", &scan("7990-8009"), |_| session(1));
    assert_eq!(asked.questions.len(), 1, "{asked:#?}");
    assert!(asked.output.contains("8000/tcp open"), "{asked:#?}");
    let closed = asked.output.matches("/tcp closed").count();
    assert_eq!(closed, 19, "{asked:#?}");
    let asked = place.run("ports", &scan("7998-8001"), |_| session(0));
    let mut ports = asked.asked();
    ports.sort();
    let each = [7998, 7999, 8000, 8001].map(|port| format!("nmap connect tcp 203.0.113.2:{port}"));
    assert_eq!(ports, each, "{asked:#?}");
    assert!(asked.output.contains("8000/tcp open"), "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn git_clones_from_a_server_that_was_allowed() {
    let place = Place::new();
    let repositories = place.directory("repositories");
    let script = "git init -q $0/one && cd $0/one && echo text > file && git add file && \
                  git -c user.name=a -c user.email=a@b commit -q -m one";
    let init = ["sh", "-ec", script, &repositories];
    place.near.exec(&init).unwrap();
    let base = format!("--base-path={repositories}");
    let daemon = ["git", "daemon", "--reuseaddr", "--export-all", &base];
    place.serve(&daemon, ":9418");
    let words = split("git clone git://203.0.113.2/one");
    place.denied("late", &words, "unable to connect");
    let asked = place.run("clone", &words, |_| session(0));
    let once = ["git connect tcp 203.0.113.2:9418"];
    assert_eq!(asked.asked(), once, "{asked:#?}");
    let file = place.lab.dir().join("home-clone/one/file");
    assert_eq!(fs::read_to_string(file).unwrap(), "text\n", "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn wget_of_busybox_writes_into_a_pipe() {
    let place = Place::new();
    place.serve_pages();
    let script = format!("busybox wget -q -O - {URL} | cat; echo ${{PIPESTATUS[0]}} ended");
    let words = ["bash", "-c", &script];
    let error = "can't connect to remote host (203.0.113.2): Permission denied";
    place.denied("late", &words, error);
    let asked = place.run("pipe", &words, |_| session(0));
    assert_eq!(
        asked.asked(),
        ["busybox connect tcp 203.0.113.2:8000"],
        "{asked:#?}"
    );
    assert!(asked.output.contains("a page"), "{asked:#?}");
    assert!(asked.output.contains("0 ended"), "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn ssh_and_a_database_speak_with_servers_that_were_allowed() {
    let place = Place::new();
    let keys = place.directory("keys");
    let key = format!("{keys}/host");
    let make = ["dropbearkey", "-t", "ed25519", "-f", &key];
    place.far.exec(&make).unwrap();
    let ssh_server = [
        "dropbear",
        "-F",
        "-E",
        "-s",
        "-r",
        &key,
        "-P",
        "",
        "-p",
        "203.0.113.2:22",
    ];
    place.serve(&ssh_server, "203.0.113.2:22");
    // OpenSSH's wants the user in /etc/passwd.
    let ssh = "dbclient -y -T nobody@203.0.113.2 true";
    place.denied("ssh-late", &split(ssh), "Connect failed: Permission denied");
    let data = place.directory("data");
    // One program under two names; the package that has this one starts a service.
    let server = format!("{data}/redis-server");
    std::os::unix::fs::symlink("/usr/bin/redis-check-rdb", &server).unwrap();
    let options = split("--bind 203.0.113.2 --protected-mode no --save --dir");
    let database = [&[server.as_str()], &options[..]].concat();
    place.serve(&[&database[..], &[data.as_str()]].concat(), ":6379");
    let get = "redis-cli -h 203.0.113.2 get name";
    place.denied("redis-late", &split(get), "Could not connect");

    // Keys are agreed on; nobody may log in.
    let asked = place.run("ssh", &split(ssh), |_| session(0));
    let once = ["dbclient connect tcp 203.0.113.2:22"];
    assert_eq!(asked.asked(), once, "{asked:#?}");
    for said in ["key accepted", "No auth methods could be used"] {
        assert!(asked.errors.contains(said), "{asked:#?}");
    }
    let script = "redis-cli -h 203.0.113.2 set name value && redis-cli -h 203.0.113.2 get name";
    let asked = place.run("redis", &["sh", "-c", script], |_| session(0));
    let once = ["redis-cli connect tcp 203.0.113.2:6379"];
    assert_eq!(asked.asked(), once, "{asked:#?}");
    assert!(asked.output.contains("value"), "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn a_client_of_quic_asks_once_and_speaks_with_its_server() {
    let place = Place::new();
    let server = quic_server(&place.lab, &place.far).unwrap();
    place.serve_by(server, "gtlsserver", ":4433");
    let words = ["sh", "-c", FETCH_BY_QUIC, "sh", SERVER];
    place.denied("late", &words, "Permission denied");
    let asked = place.run("quic", &words, |_| session(0));
    let once = ["gtlsclient connect udp 203.0.113.2:4433"];
    assert_eq!(asked.asked(), once, "{asked:#?}");
    assert!(asked.output.contains(PAGE), "{asked:#?}");
    assert!(place.frames() > 0);
}

const THREADS: &str = "import socket, sys, threading
def one(port):
    try:
        with socket.create_connection(('203.0.113.2', port), 50) as peer:
            sys.stdout.write(f'{port} {peer.recv(9).decode()}\\n')
    except OSError as error:
        sys.stderr.write(f'{port} {type(error).__name__}\\n')
threads = [threading.Thread(target=one, args=(7001 + n % 4,)) for n in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
";

#[test]
fn threads_of_one_program_wait_for_one_question_per_destination() {
    let place = Place::new();
    for port in 7001..=7004 {
        let at = SocketAddr::new(SERVER.parse().unwrap(), port);
        let listener = place.far.enter(|| TcpListener::bind(at)).unwrap().unwrap();
        thread::spawn(move || {
            for mut stream in listener.incoming().map(Result::unwrap) {
                stream.write_all(b"hello").unwrap();
            }
        });
    }
    let words = ["/usr/bin/python3", "-c", THREADS];
    let asked = place.denied("late", &words, "7001 PermissionError");
    assert_eq!(asked.questions.len(), 4, "{asked:#?}");
    // One is refused, and only those who wait for it are.
    let asked = place.run("threads", &words, |question| {
        let is_refused = question["to"]["port"] == 7004;
        reply(if is_refused { "deny" } else { "allow" }, 0)
    });
    assert_eq!(asked.questions.len(), 4, "{asked:#?}");
    for port in 7001..=7003 {
        let line = format!("{port} hello\n");
        assert_eq!(asked.output.matches(&line).count(), 8, "{asked:#?}");
    }
    let refused = asked.errors.matches("7004 PermissionError").count();
    assert_eq!(refused, 8, "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn a_browser_shows_a_page_that_was_allowed_and_phones_nobody_else() {
    let place = Place::new();
    place.serve_pages();
    place.serve_names();
    let words = split(
        "chromium --headless --no-sandbox --no-zygote --disable-gpu --user-data-dir=profile \
         --virtual-time-budget=4000 --dump-dom http://web.test:8000/page.html",
    );
    let about_page = |question: &Value| question["to"]["name"] == "web.test";
    // It picks ports for its own questions for names by itself: one rule is for all of them.
    let listens = |question: &Value| question["doing"] == "listen";
    place.denied_but("late", &words, "", |question| match about_page(question) {
        true => None,
        false => reply("deny", usize::from(listens(question))),
    });
    let asked = place.run("page", &words, |question| match listens(question) {
        true => session(1),
        false => reply(
            if about_page(question) {
                "allow"
            } else {
                "deny"
            },
            0,
        ),
    });
    // Style and script came, too.
    assert!(asked.output.contains("rgb(255, 0, 0)"), "{asked:#?}");
    let all = asked.questions.iter();
    assert_eq!(all.filter(|it| about_page(it)).count(), 1, "{asked:#?}");
    assert!(place.frames() > 0);
}

#[test]
fn a_question_of_one_program_does_not_hold_up_the_allowed_calls_of_another() {
    let place = Place::new();
    place.serve_pages();
    place.serve(
        &["busybox", "httpd", "-f", "-p", "8001", "-h", "/"],
        ":8001",
    );
    let asks = "http://203.0.113.2:8001/none.html";
    let script =
        format!("curl -sS -o /dev/null {asks} & curl -sS -f {URL} && echo is here; wait $!");
    let mut sandbox = place.start("two", &["--timeout", "60s"], &["sh", "-c", &script]);
    let mut open = Vec::new();
    for _ in 0..2 {
        open.extend(sandbox.event());
    }
    let at = |port: u16| open.iter().find(|event| event["ask"]["to"]["port"] == port);
    // The second is answered first, while the other stays open, and runs to its end.
    sandbox
        .reply(&at(8000).unwrap()["ask"], session(0).unwrap())
        .unwrap();
    eventually("one program is done", || {
        sandbox.output().contains("is here")
    });
    assert!(sandbox.event().unwrap().get("settled").is_some());
    let asked = sandbox.output();
    sandbox
        .reply(&at(8001).unwrap()["ask"], session(0).unwrap())
        .unwrap();
    let ended = sandbox.finish(|_| None).unwrap();
    assert!(
        ended.status.success() && ended.questions.is_empty(),
        "{asked}{ended:#?}"
    );
}

#[test]
fn a_person_answers_by_the_command_and_what_holds_always_is_not_asked_again() {
    let place = Place::new();
    place.serve_pages();
    let words = ["curl", "-s", "-S", URL];
    let sandbox = place.start("person", &["--timeout", "60s"], &words);
    let mut ask = Command::new(program("vnplug").unwrap());
    ask.args(["sandbox", "ask"]);
    let home = place.lab.dir().join("home-person");
    asking::at_home(&mut ask, &home);
    let mut ask = Running::start(ask, &place.lab, "ask").unwrap();
    eventually("the question is shown", || {
        ask.output().contains("question 1: curl")
    });
    ask.says("a\n").unwrap();
    let asked = sandbox.finish(|_| None).unwrap();
    assert!(asked.output.contains("a page"), "{asked:#?}");
    eventually("the command ends with the sandbox", || {
        ask.status().is_some()
    });
    // The next run asks nothing.
    let asked = place.run("person", &words, |_| None);
    assert!(
        asked.questions.is_empty() && asked.output.contains("a page"),
        "{asked:#?}"
    );
}
