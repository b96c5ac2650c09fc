//! Tables of rules, and what holds whatever the rules are.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use vnplug_testing::TestDir;

use super::edit::{self, Where};
use super::file::{self, parse};
use super::policy::{Policy, Reason};
use super::rule::{Origin, Rule, Say};
use crate::act::{Act, Ancestor, Doing, Target, Transport, Who};
use crate::floor::Floor;
use crate::name::Name;

fn rules(text: &str) -> Vec<Arc<Rule>> {
    parse(text, |line, _| {
        Origin::File(Arc::new("t.toml".into()), line)
    })
    .unwrap()
    .rules
}

fn policy(default: Say, text: &str) -> Policy {
    Policy {
        rules: rules(text),
        default,
        ..Policy::default()
    }
}

fn who(program: &str, parents: &[&str]) -> Arc<Who> {
    let ancestor = |program: &&str| Ancestor {
        pid: 2,
        program: PathBuf::from(program),
    };
    Arc::new(Who {
        pid: 7,
        started: 100,
        program: program.into(),
        hash: Some([0xab; 32]),
        arguments: vec![
            program.rsplit('/').next().unwrap().to_owned(),
            "-v".to_owned(),
            "x y".to_owned(),
        ],
        ancestors: parents.iter().map(ancestor).collect(),
    })
}

/// `tcp 192.0.2.1:80`, `resolve example.org`, `unix /run/x`, `abstract x`, `listen udp 0.0.0.0:53`, `raw`, …
fn act(text: &str) -> Act {
    let words: Vec<&str> = text.split(' ').collect();
    let to = |text: &str| Target::Internet(text.parse::<SocketAddr>().unwrap());
    let by = |word: &str| match word {
        "tcp" => Transport::Tcp,
        "udp" => Transport::Udp,
        "icmp" => Transport::Icmp,
        "sctp" => Transport::Other(132),
        "raw" => Transport::Raw,
        "packet" => Transport::Packet,
        "netlink" => Transport::Netlink(16),
        word => panic!("{word}"),
    };
    let (doing, transport, target) = match words.as_slice() {
        ["resolve", name] => (
            Doing::Resolve,
            Transport::Udp,
            Target::Name((*name).to_owned()),
        ),
        ["unix", path] => (Doing::Connect, Transport::Unix, Target::Path(path.into())),
        ["abstract", name] => (
            Doing::Connect,
            Transport::Unix,
            Target::Abstract(name.as_bytes().to_vec()),
        ),
        ["vsock", cid] => (
            Doing::Connect,
            Transport::Vsock,
            Target::Vsock {
                cid: cid.parse().unwrap(),
                port: 5,
            },
        ),
        ["write", path] => (Doing::Write, Transport::File, Target::Path(path.into())),
        ["execute", path] => (Doing::Execute, Transport::File, Target::Path(path.into())),
        ["listen", transport, address] => (Doing::Bind, by(transport), to(address)),
        ["accept", transport, address] => (Doing::Accept, by(transport), to(address)),
        [transport, address] => (Doing::Connect, by(transport), to(address)),
        [transport] => (Doing::Create, by(transport), Target::Nobody),
        words => panic!("{words:?}"),
    };
    Act {
        who: who("/usr/bin/curl", &["/bin/sh", "/usr/bin/make"]),
        doing,
        transport,
        target,
    }
}

fn names(text: &str) -> Vec<Name> {
    text.split_whitespace()
        .map(|name| Name::new(name).unwrap())
        .collect()
}

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

/// True if a rule with these conditions is about the act.
fn is_about(conditions: &str, what: &str, known: &str) -> bool {
    let rules = rules(&format!(
        "[[rule]]\nsay = \"allow\"\n{}\n",
        conditions.replace("; ", "\n")
    ));
    rules[0].matches(&act(what), &names(known), now())
}

#[test]
fn each_condition_holds_for_what_it_says_and_nothing_else() {
    for (conditions, what, known, expected) in [
        // Nothing said: every act with an address that is not on the floor.
        ("", "tcp 192.0.2.1:80", "", true),
        ("", "sctp 192.0.2.1:80", "", true),
        ("", "icmp 192.0.2.1:0", "", true),
        ("", "resolve example.org", "", true),
        ("", "tcp 127.0.0.1:80", "", false),
        ("", "raw 192.0.2.1:0", "", false),
        ("", "raw", "", false),
        ("", "unix /run/x", "", false),
        ("", "abstract x", "", false),
        ("", "listen tcp 192.0.2.1:80", "", false),
        ("", "write /etc/passwd", "", false),
        // Who.
        ("program = '/usr/bin/curl'", "tcp 192.0.2.1:80", "", true),
        ("program = '/usr/bin/*'", "tcp 192.0.2.1:80", "", true),
        ("program = '/usr/*'", "tcp 192.0.2.1:80", "", false),
        ("program = '**/curl'", "tcp 192.0.2.1:80", "", true),
        ("program = '/usr/bin/wget'", "tcp 192.0.2.1:80", "", false),
        (
            "sha256 = 'abababababababababababababababababababababababababababababababab'",
            "tcp 192.0.2.1:80",
            "",
            true,
        ),
        (
            "sha256 = 'ababababababababababababababababababababababababababababababab00'",
            "tcp 192.0.2.1:80",
            "",
            false,
        ),
        ("arguments = 'curl -v *'", "tcp 192.0.2.1:80", "", true),
        ("arguments = 'curl'", "tcp 192.0.2.1:80", "", false),
        ("parent = '/usr/bin/make'", "tcp 192.0.2.1:80", "", true),
        ("parent = '/usr/bin/curl'", "tcp 192.0.2.1:80", "", false),
        // Protocol.
        ("protocol = 'tcp'", "tcp 192.0.2.1:80", "", true),
        ("protocol = ['tcp', 'udp']", "udp 192.0.2.1:80", "", true),
        ("protocol = 'udp'", "tcp 192.0.2.1:80", "", false),
        ("protocol = 'udp'", "resolve example.org", "", true),
        ("protocol = 'ip:132'", "sctp 192.0.2.1:80", "", true),
        ("protocol = 'raw'", "raw", "", true),
        ("protocol = 'raw'", "raw 192.0.2.1:0", "", true),
        ("protocol = 'raw'", "raw 10.0.0.1:0", "", false),
        ("protocol = 'raw'; to = '192.0.2.1'", "raw", "", true),
        (
            "protocol = 'raw'; to = '192.0.2.1'",
            "raw 192.0.2.2:0",
            "",
            false,
        ),
        ("protocol = 'netlink'", "netlink", "", true),
        ("protocol = 'netlink:16'", "netlink", "", true),
        ("protocol = 'netlink:0'", "netlink", "", false),
        ("protocol = 'packet'", "packet", "", true),
        ("protocol = 'unix'", "unix /run/x", "", true),
        ("protocol = 'unix'", "abstract x", "", true),
        ("protocol = 'unix'", "resolve example.org", "", false),
        // Addresses.
        ("to = '192.0.2.1'", "tcp 192.0.2.1:80", "", true),
        ("to = '192.0.2.1'", "tcp [::ffff:192.0.2.1]:80", "", true),
        ("to = '192.0.2.0/24'", "tcp 192.0.2.255:80", "", true),
        ("to = '192.0.2.0/24'", "tcp 192.0.3.0:80", "", false),
        ("to = '0.0.0.0/0'", "tcp 192.0.2.1:80", "", true),
        ("to = '0.0.0.0/0'", "tcp [2001:db8::1]:80", "", false),
        ("to = '192.0.2.1'", "resolve example.org", "", false),
        ("to = '192.0.2.1'", "tcp 192.0.2.2:80", "example.org", false),
        // Ports.
        ("port = 80", "tcp 192.0.2.1:80", "", true),
        ("port = [79, '80-90']", "tcp 192.0.2.1:81", "", true),
        ("port = 443", "tcp 192.0.2.1:80", "", false),
        ("port = 443", "resolve example.org", "", true),
        // Names.
        ("to = 'example.org'", "resolve example.org", "", true),
        ("to = 'example.org'", "resolve EXAMPLE.org.", "", true),
        ("to = 'example.org'", "resolve www.example.org", "", false),
        ("to = '*.example.org'", "resolve www.example.org", "", true),
        ("to = '*.example.org'", "resolve example.org", "", false),
        ("to = '*.example.org'", "resolve evilexample.org", "", false),
        (
            "to = 'example.org'",
            "tcp 192.0.2.1:80",
            "example.org",
            true,
        ),
        (
            "to = 'example.org'",
            "tcp 192.0.2.1:80",
            "other.org example.org",
            true,
        ),
        ("to = 'example.org'", "tcp 192.0.2.1:80", "", false),
        ("to = 'example.org'", "tcp 192.0.2.1:80", "other.org", false),
        // The floor.
        ("to = 'any'", "tcp 10.0.0.1:80", "", false),
        ("to = '0.0.0.0/0'", "tcp 10.0.0.1:80", "", false),
        ("to = '10.0.0.0/8'", "tcp 10.0.0.1:80", "", true),
        ("to = '169.254.0.0/16'", "tcp 169.254.169.254:80", "", true),
        ("to = 'private'", "tcp 10.0.0.1:80", "", true),
        ("to = 'private'", "tcp 127.0.0.1:80", "", false),
        ("to = 'link-local'", "tcp 169.254.169.254:80", "", false),
        ("to = 'metadata'", "tcp 169.254.169.254:80", "", true),
        (
            "to = 'example.org'",
            "tcp 10.0.0.1:80",
            "example.org",
            false,
        ),
        (
            "to = 'example.org'; local = true",
            "tcp 10.0.0.1:80",
            "example.org",
            true,
        ),
        (
            "to = 'example.org'; local = true",
            "tcp 10.0.0.1:80",
            "",
            false,
        ),
        // Listening and accepting.
        ("direction = 'listen'", "listen tcp 0.0.0.0:80", "", true),
        (
            "direction = 'listen'; to = 'loopback'",
            "listen tcp 127.0.0.1:80",
            "",
            true,
        ),
        (
            "direction = 'listen'; to = 'loopback'",
            "listen tcp 192.0.2.1:80",
            "",
            false,
        ),
        (
            "direction = 'listen'; port = '1024-65535'",
            "listen udp 0.0.0.0:53",
            "",
            false,
        ),
        (
            "direction = 'accept'; to = 'private'",
            "accept tcp 10.0.0.1:4000",
            "",
            true,
        ),
        ("direction = 'accept'", "tcp 192.0.2.1:80", "", false),
        // Other families, and files.
        ("to = 'unix:/run/*'", "unix /run/x", "", true),
        ("to = 'unix:/run/*'", "unix /run/a/x", "", false),
        ("to = 'unix:@x*'", "abstract xyz", "", true),
        ("to = 'unix:@x*'", "unix /run/x", "", false),
        ("to = 'vsock:2'", "vsock 2", "", true),
        ("to = 'vsock:3'", "vsock 2", "", false),
        ("to = 'vsock:any'; port = 6", "vsock 2", "", false),
        ("direction = 'write'", "write /etc/passwd", "", true),
        (
            "direction = 'write'; to = 'file:/tmp/**'",
            "write /tmp/a/b",
            "",
            true,
        ),
        (
            "direction = 'write'; to = 'file:/tmp/**'",
            "write /etc/passwd",
            "",
            false,
        ),
        ("direction = 'execute'", "write /etc/passwd", "", false),
        // Until.
        ("until = 2030-01-01T00:00:00Z", "tcp 192.0.2.1:80", "", true),
        (
            "until = 2020-01-01T00:00:00Z",
            "tcp 192.0.2.1:80",
            "",
            false,
        ),
    ] {
        assert_eq!(
            is_about(conditions, what, known),
            expected,
            "{conditions} | {what} | {known}"
        );
    }
}

#[test]
fn a_rule_that_refuses_some_port_does_not_refuse_the_name() {
    let deny = |more: &str, what: &str| {
        rules(&format!(
            "[[rule]]\nsay = 'deny'\nto = 'example.org'\n{more}"
        ))[0]
            .matches(&act(what), &[], now())
    };
    assert!(deny("", "resolve example.org"));
    assert!(!deny("port = 25", "resolve example.org"));
    assert!(!deny("protocol = 'udp'", "resolve example.org"));
    let raw = rules("[[rule]]\nsay = 'deny'\nprotocol = 'raw'\nto = '192.0.2.1'\n");
    assert!(!raw[0].matches(&act("raw"), &[], now()));
    // What refuses need not name the floor.
    assert!(rules("[[rule]]\nsay = 'deny'\n")[0].matches(&act("tcp 10.0.0.1:1"), &[], now()));
}

#[test]
fn the_first_rule_decides_and_then_the_default() {
    let policy = policy(
        Say::Ask,
        "[[rule]]\nsay = 'deny'\nto = '192.0.2.7'\n[[rule]]\nsay = 'allow'\nto = '192.0.2.0/24'\n\
         [[rule]]\nsay = 'deny'\nto = '192.0.2.8'\n",
    );
    let say = |what: &str| policy.decide(&act(what), &[], now());
    assert_eq!(say("tcp 192.0.2.7:1").say, Say::Deny);
    assert_eq!(say("tcp 192.0.2.8:1").say, Say::Allow);
    assert_eq!(
        (say("tcp 192.0.3.1:1").say, say("tcp 192.0.3.1:1").reason),
        (Say::Ask, Reason::Default)
    );
    let Reason::Rule(rule) = say("tcp 192.0.2.8:1").reason else {
        panic!()
    };
    assert_eq!(rule.origin.to_string(), "t.toml:4");
    assert_eq!(say("accept tcp 192.0.3.1:1").say, Say::Allow);
}

#[test]
fn answers_hold_where_rules_ask_and_never_on_the_floor() {
    let mut policy = policy(
        Say::Ask,
        "[[rule]]\nsay = 'deny'\nto = '192.0.2.7'\n[[rule]]\nsay = 'ask'\nto = '192.0.2.8'\n[[rule]]\nsay = 'ask'\n\
         to = 'private'\n",
    );
    policy.answers = rules("[[rule]]\nsay = 'allow'\nto = ['any', 'private', 'loopback']\n");
    let say = |what: &str| policy.decide(&act(what), &[], now());
    assert_eq!(say("tcp 192.0.2.7:1").say, Say::Deny);
    assert_eq!(say("tcp 192.0.2.8:1").say, Say::Allow);
    assert_eq!(say("tcp 192.0.2.9:1").say, Say::Allow);
    assert_eq!(say("tcp 10.0.0.1:1").say, Say::Ask);
    assert_eq!(
        say("tcp 127.0.0.1:1").reason,
        Reason::Floor(Floor::Loopback)
    );
}

#[test]
fn nothing_but_a_rule_that_names_it_opens_the_floor() {
    let say =
        |default, text: &str, what: &str| policy(default, text).decide(&act(what), &[], now()).say;
    for what in [
        "tcp 169.254.169.254:80",
        "udp [::ffff:127.0.0.1]:53",
        "tcp [::1]:1",
        "tcp 10.1.1.1:22",
        "icmp 224.0.0.1:0",
    ] {
        assert_eq!(say(Say::Allow, "", what), Say::Deny, "{what}");
        assert_eq!(
            say(Say::Ask, "[[rule]]\nsay = 'allow'\n", what),
            Say::Deny,
            "{what}"
        );
        assert_eq!(
            say(Say::Ask, "[[rule]]\nsay = 'ask'\nto = '0.0.0.0/0'\n", what),
            Say::Deny,
            "{what}"
        );
    }
    let open = "[[rule]]\nsay = 'allow'\n[[rule]]\nsay = 'allow'\nto = '10.0.0.0/8'\n";
    assert_eq!(say(Say::Deny, open, "tcp 10.1.1.1:22"), Say::Allow);
    assert_eq!(say(Say::Deny, open, "tcp 192.168.1.1:22"), Say::Deny);
}

#[test]
fn a_loopback_of_its_own_is_open_unless_a_rule_refuses() {
    let mut policy = policy(
        Say::Deny,
        "[[rule]]\nsay = 'deny'\nport = 25\n[[rule]]\nsay = 'ask'\n",
    );
    policy.own_loopback = true;
    let say = |what: &str| policy.decide(&act(what), &[], now()).say;
    for what in [
        "tcp 127.0.0.1:80",
        "udp [::1]:53",
        "tcp 0.0.0.0:80",
        "listen tcp 127.0.0.1:80",
    ] {
        assert_eq!(say(what), Say::Allow, "{what}");
    }
    for what in [
        "tcp 127.0.0.1:25",
        "tcp 10.0.0.1:80",
        "tcp 169.254.169.254:80",
        "listen tcp 0.0.0.0:80",
        "listen udp [::]:53",
    ] {
        assert_eq!(say(what), Say::Deny, "{what}");
    }
}

/// Small random rules and acts, the same in each run.
struct Dice(u64);

impl Dice {
    fn one<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        of[usize::try_from(self.0 >> 33).unwrap() % of.len()]
    }

    fn sheet(&mut self) -> String {
        let mut text = self
            .one(&[
                "",
                "default = 'ask'\n",
                "default = 'deny'\n",
                "default = 'allow'\n",
            ])
            .to_owned();
        for _ in 0..self.one(&["", "1", "12", "123"]).len() {
            text += &format!(
                "[[rule]]\nsay = '{}'\n",
                self.one(&["allow", "ask", "deny"])
            );
            text += self.one(&["", "", "program = '/usr/bin/*'\n", "program = '/bin/*'\n"]);
            text += self.one(&["", "protocol = 'tcp'\n", "protocol = ['udp', 'raw']\n"]);
            text += self.one(&[
                "",
                "to = 'any'\n",
                "to = '192.0.2.0/24'\n",
                "to = ['10.0.0.0/8', 'loopback']\n",
                "to = 'example.org'\n",
                "to = ['*.example.org', 'a.org']\nlocal = true\n",
            ]);
            text += self.one(&["", "port = 443\n", "port = '1-100'\n"]);
        }
        text
    }

    fn act(&mut self) -> (Act, Vec<Name>) {
        let what = self.one(&[
            "tcp 192.0.2.1:80",
            "tcp 192.0.2.1:443",
            "udp 198.51.100.1:53",
            "tcp 10.0.0.1:443",
            "udp 127.0.0.1:53",
            "resolve example.org",
            "resolve www.example.org",
            "raw",
            "raw 192.0.2.1:0",
            "unix /run/x",
            "listen tcp 0.0.0.0:80",
            "accept tcp 192.0.2.1:1",
        ]);
        (
            act(what),
            names(self.one(&["", "example.org", "www.example.org a.org"])),
        )
    }
}

#[test]
fn an_address_inside_another_is_refused_and_never_allowed() {
    let say = |text: &str, what: &str| policy(Say::Allow, text).decide(&act(what), &[], now()).say;
    let deny = "[[rule]]\nsay = 'deny'\nto = '192.0.2.0/24'\n";
    for what in [
        "tcp [64:ff9b::c000:201]:80",
        "tcp [64:ff9b:1::c000:201]:80",
        "tcp [2002:c000:201::1]:80",
        "tcp [::192.0.2.1]:80",
        "tcp [2001:0:c633:6401:0:1:3fff:fdfe]:80",
        "tcp [2001:db8::5efe:c000:201]:80",
    ] {
        assert_eq!(say(deny, what), Say::Deny, "{what}");
        assert_eq!(say("", what), Say::Allow, "{what}");
        let allow = "[[rule]]\nsay = 'allow'\nto = '192.0.2.0/24'\n\
                     [[rule]]\nsay = 'deny'\nto = 'ADDRESS'\n";
        let address = &what[5..what.len() - 4];
        assert_eq!(say(&allow.replace("ADDRESS", address), what), Say::Deny);
    }
    assert_eq!(say(deny, "tcp [64:ff9b::c000:301]:80"), Say::Allow);
    // A floor is opened by its name for what is on it, and for other addresses by themselves.
    let inside = "tcp [64:ff9b::a00:1]:80";
    let open = |to: &str| format!("[[rule]]\nsay = 'allow'\nto = '{to}'\n");
    assert_eq!(say(&open("private"), "tcp 10.0.0.1:80"), Say::Allow);
    assert_eq!(say(&open("private"), inside), Say::Deny);
    assert_eq!(say(&open("10.0.0.0/8"), inside), Say::Deny);
    assert_eq!(say(&open("64:ff9b::a00:1"), inside), Say::Allow);
    // A loopback of the sandbox's own is not behind a tunnel.
    let own = Policy {
        own_loopback: true,
        ..policy(Say::Allow, "")
    };
    for (what, expected) in [
        ("tcp 127.0.0.1:80", Say::Allow),
        ("tcp [::1]:80", Say::Allow),
        ("tcp [::ffff:127.0.0.1]:80", Say::Allow),
        ("tcp [64:ff9b::7f00:1]:80", Say::Deny),
        ("tcp [2002:7f00:1::1]:80", Say::Deny),
    ] {
        assert_eq!(own.decide(&act(what), &[], now()).say, expected, "{what}");
    }
}

#[test]
fn a_file_of_rules_is_a_file_with_an_end() {
    let dir = TestDir::new("sandbox-rules-file");
    let fifo = dir.path("fifo");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let zero = dir.path("zero");
    std::os::unix::fs::symlink("/dev/zero", &zero).unwrap();
    for path in [fifo.as_path(), &zero, &dir.0] {
        let error = file::read(path).unwrap_err().to_string();
        assert!(
            error.ends_with("a file of rules must be a regular file"),
            "{error}"
        );
    }
    let long = dir.path("long");
    std::fs::File::create(&long)
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let error = file::read(&long).unwrap_err().to_string();
    assert!(error.contains("has at most 4194304 bytes"), "{error}");
    assert!(file::read(&dir.path("none")).unwrap().rules.is_empty());
}

#[test]
fn a_project_can_only_tighten() {
    let mut dice = Dice(3);
    let mut tightened = 0;
    for _ in 0..20_000 {
        let own = dice.sheet();
        let mut policy = policy(
            dice.one(&[&Say::Allow, &Say::Ask, &Say::Deny]).to_owned(),
            &own,
        );
        let (act, names) = dice.act();
        let before = policy.decide(&act, &names, now()).say;
        let theirs = dice.sheet();
        policy.project = Some(parse(&theirs, |_, number| Origin::Builtin("p", number)).unwrap());
        let after = policy.decide(&act, &names, now()).say;
        assert!(after >= before, "{own}\nwith\n{theirs}\non {act:?}");
        tightened += u32::from(after > before);
    }
    // The generator does make projects that say something.
    assert!(tightened > 1000, "{tightened}");
}

#[test]
fn a_packet_passes_only_where_every_program_could_send_it() {
    let mut dice = Dice(5);
    let mut passed = 0;
    for _ in 0..20_000 {
        let text = dice.sheet();
        let policy = policy(
            dice.one(&[&Say::Allow, &Say::Ask, &Say::Deny]).to_owned(),
            &text,
        );
        let (mut act, names) = dice.act();
        let Target::Internet(to) = act.target else {
            continue;
        };
        if act.doing != Doing::Connect || !policy.allows_anybody(act.transport, to, &names, now()) {
            continue;
        }
        passed += 1;
        for program in ["/usr/bin/curl", "/bin/sh", "/opt/x"] {
            act.who = who(program, &[]);
            assert_eq!(
                policy.decide(&act, &names, now()).say,
                Say::Allow,
                "{program} on {act:?} with\n{text}"
            );
        }
    }
    assert!(passed > 500, "{passed}");
}

#[test]
fn what_is_wrong_in_a_file_is_said_with_its_line_and_what_to_do() {
    for (text, line, what) in [
        ("[[rule]]\nsay = 'alow'\n", 2, "allow, ask or deny"),
        ("\n[[rule]]\nprogram = '/bin/x'\n", 2, "add say"),
        (
            "[[rule]]\nsay = 'allow'\nprogramm = '/bin/x'\n",
            3,
            "no key of a rule",
        ),
        (
            "[[rule]]\nsay = 'allow'\nprogram = 'curl'\n",
            3,
            "whole path",
        ),
        (
            "[[rule]]\nsay = 'allow'\nto = 'http://x.org'\n",
            3,
            "write example.org",
        ),
        (
            "[[rule]]\nsay = 'allow'\nto = []\n",
            3,
            "leave the key away",
        ),
        ("[[rule]]\nsay = 'allow'\nto = 3\n", 3, "text in quotes"),
        (
            "[[rule]]\nsay = 'allow'\nport = 70000\n",
            3,
            "443 or 8000-8999",
        ),
        ("[[rule]]\nsay = 'allow'\nport = true\n", 3, "443"),
        (
            "[[rule]]\nsay = 'allow'\nuntil = 2026-01-01\n",
            3,
            "with its zone",
        ),
        (
            "[[rule]]\nsay = 'allow'\nuntil = 2026-01-01T00:00:00\n",
            3,
            "with its zone",
        ),
        (
            "[[rule]]\nsay = 'allow'\nlocal = true\n",
            1,
            "local is for rules with names",
        ),
        (
            "[[rule]]\nsay = 'allow'\nprotocol = 'packet'\nport = 1\n",
            1,
            "leave to and port away",
        ),
        (
            "[[rule]]\nsay = 'allow'\nto = 'file:/tmp'\n",
            1,
            "direction",
        ),
        (
            "[[rule]]\nsay = 'allow'\ndirection = 'listen'\nto = 'a.org'\n",
            1,
            "write addresses",
        ),
        ("# x\n[rule]\nsay = 'allow'\n", 2, "double brackets"),
        ("defaults = 'ask'\n", 1, "no key of a file"),
        ("default = 'ask'\ndefault = 'deny'\n", 2, "no TOML"),
        ("timeout = 'soon'\n", 1, "timeout"),
        ("[[rule]\n", 1, "no TOML"),
    ] {
        let error = parse(text, |line, _| {
            Origin::File(Arc::new("f.toml".into()), line)
        })
        .unwrap_err()
        .to_string();
        assert!(
            error.starts_with(&format!("f.toml:{line}: ")) && error.contains(what),
            "{text:?}: {error}"
        );
    }
}

#[test]
fn a_rule_is_written_as_it_is_read() {
    let text = "[[rule]]\nsay = \"ask\"\nprogram = \"/opt/a \\\"b\\\"\"\nsha256 = \"abababababababababababababababababababababababababababababababab\"\n\
        arguments = \"x *\"\nparent = \"**/make\"\nprotocol = [\"tcp\", \"ip:132\"]\nto = [\"*.example.org\", \"192.0.2.0/24\", \"private\"]\n\
        port = [443, \"8000-8999\"]\nlocal = true\nuntil = 2030-02-28T23:59:59Z\nnote = \"a \\u0007 b\"\n";
    assert_eq!(
        file::parse(&edit::write(&rules(text)[0]), |_, _| Origin::Given)
            .unwrap()
            .rules
            .len(),
        1
    );
    let again = rules(&edit::write(&rules(text)[0]));
    assert_eq!(again, rules(text));
}

#[test]
fn a_machines_edit_keeps_what_people_wrote() {
    let dir = TestDir::new("sandbox-rules-edit");
    let path = dir.path("a.toml");
    let hand = "# My rules.\ndefault   =   'ask'  # not allow\n\n# Git talks to our server.\n[[rule]]\nsay='allow' # yes\n\
                program = \"/usr/bin/git\"\n\n# Nothing else does.\n[[rule]]\nsay = 'deny'\n# the end";
    std::fs::write(&path, hand).unwrap();
    let mut rule = Rule::new(Say::Allow);
    rule.to = vec!["example.org".parse().unwrap()];
    edit::add(&path, &rule, Where::Last).unwrap();
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    assert_eq!(
        text(&path),
        format!("{hand}\n\n[[rule]]\nsay = \"allow\"\nto = \"example.org\"\n")
    );
    edit::add(&path, &rule, Where::First).unwrap();
    assert!(
        text(&path).contains(
            "# not allow\n\n[[rule]]\nsay = \"allow\"\nto = \"example.org\"\n\n# Git talks"
        )
    );
    assert_eq!(file::read(&path).unwrap().rules.len(), 4);

    let removed = edit::remove(&path, 2).unwrap();
    assert_eq!(
        removed.program.as_ref().unwrap().to_string(),
        "/usr/bin/git"
    );
    let left = text(&path);
    assert!(
        !left.contains("git") && left.contains("# My rules.\ndefault   =   'ask'  # not allow"),
        "{left}"
    );
    assert!(
        left.contains("# Nothing else does.\n[[rule]]\nsay = 'deny'\n"),
        "{left}"
    );
    assert!(
        edit::remove(&path, 9)
            .unwrap_err()
            .to_string()
            .contains("there is no rule 9, but 3")
    );

    // A file with errors is left alone, and no part of a file is left behind.
    std::fs::write(&path, "[[rule]]\nsay = 'perhaps'\n").unwrap();
    assert!(edit::add(&path, &rule, Where::Last).is_err());
    assert_eq!(text(&path), "[[rule]]\nsay = 'perhaps'\n");
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 1);
    // A file that is not there is made, with the directories above it.
    let new = dir.path("x/y/b.toml");
    edit::add(&new, &rule, Where::First).unwrap();
    assert_eq!(file::read(&new).unwrap().rules.len(), 1);
}

#[test]
fn two_who_edit_at_once_lose_nothing() {
    let dir = TestDir::new("sandbox-rules-race");
    let path = dir.path("a.toml");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10 {
                    edit::add(&path, &Rule::new(Say::Deny), Where::Last).unwrap();
                }
            });
        }
    });
    assert_eq!(file::read(&path).unwrap().rules.len(), 40);
}
