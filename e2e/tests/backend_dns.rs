//! The example `examples/dns`: real questions and answers between two namespaces, then lies.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::UdpSocket;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use vnplug::{Channel, ChannelOptions, Error, Told};
use vnplug_e2e::attached::{AttachedUml, agent, image, values};
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::third_party::build_c;
use vnplug_e2e::{Lab, Netns};
use vnplug_testing::{Deadline, PATIENCE};

const SOON: Option<Duration> = Some(Duration::from_secs(20));

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A wire between a client and a server, with the back-end beside the client.
struct Scene {
    far: Netns,
    back: Running,
    daemon: Daemon,
    near: Netns,
    lab: Lab,
}

impl Scene {
    fn new() -> Self {
        let (lab, near, far) = (
            Lab::new().unwrap(),
            Netns::new().unwrap(),
            Netns::new().unwrap(),
        );
        near.veth("wire0", "wire1").unwrap();
        near.ip(&["link", "set", "wire1", "netns", far.name()])
            .unwrap();
        for (netns, wire, addresses) in [
            (&near, "wire0", &["10.9.0.1/24"][..]),
            (&far, "wire1", &["10.9.0.2/24", "10.9.0.3/24"]),
        ] {
            netns.ip(&["link", "set", wire, "arp", "on", "up"]).unwrap();
            for address in addresses {
                netns.ip(&["addr", "add", address, "dev", wire]).unwrap();
            }
        }
        let args = ["--source", "wire0", "--backend", "dns,id=86,uid=0,open=*"];
        let daemon = Daemon::start(&lab, Some(&near), &args).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/dns/dns.c");
        // What it reads or writes beyond memory of its own ends it.
        let checks = [
            "-g",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover",
        ];
        let program = build_c(&source, lab.dir(), &checks).unwrap();
        let back = Command::new(program)
            .args(["86", "dns", "host:wire0"])
            .env("VNPLUG_SOCKET", daemon.socket())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            far,
            back: Running(back),
            daemon,
            near,
            lab,
        }
    }

    /// A program that is told of names under one.
    fn program(&self, under: &str) -> Channel {
        let options = || ChannelOptions::new("dns").socket(self.daemon.socket());
        let mut program = options().open_when_there().unwrap();
        while !program.is_open() {
            program.next(SOON).unwrap();
        }
        program.send(under.as_bytes()).unwrap();
        program
    }

    fn dig(&self, words: &[&str]) {
        let asked = [&["dig", "+tries=1", "+time=10", "@10.9.0.2"], words].concat();
        self.near.exec(&asked).unwrap();
    }

    fn dnsmasq(&self) -> Running {
        let server = self
            .far
            .command("dnsmasq")
            .args(["-k", "-C", "/dev/null", "-u", "root", "--pid-file="])
            .args(["--no-resolv", "--no-hosts", "--local=/test/"])
            .args(["--listen-address=10.9.0.2", "--bind-interfaces"])
            .args(["--host-record=www.under.test,192.0.2.7,2001:db8::7"])
            .args(["--cname=alias.under.test,www.under.test"])
            .args(["--host-record=aside.test,192.0.2.8"])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Running(server);
        vnplug_testing::eventually("dnsmasq answers", || {
            let asks = ["dig", "+tries=1", "+time=1", "@10.9.0.2", "version.bind"];
            self.far.exec(&asks).is_ok()
        });
        server
    }
}

fn told(program: &mut Channel) -> Value {
    match program.next(SOON).unwrap() {
        Some(Told::Message(bytes)) => serde_json::from_slice(&bytes).unwrap(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn programs_are_told_of_the_names_that_they_asked_for() {
    let scene = Scene::new();
    let _server = scene.dnsmasq();
    let (mut some, mut all) = (scene.program("Under.TEST.\n"), scene.program(""));
    // Its name comes before what is on the wire from now on: it reads messages first.
    std::thread::sleep(Duration::from_millis(300));
    scene.dig(&["aside.test"]);
    scene.dig(&["sunder.test"]);
    scene.dig(&["alias.under.test"]);
    scene.dig(&["www.under.test", "AAAA"]);
    for (name, rcode) in [("aside.test", 0), ("sunder.test", 3)] {
        let answer = told(&mut all);
        assert_eq!(
            (&answer["name"], &answer["rcode"]),
            (&name.into(), &rcode.into())
        );
    }
    for program in [&mut some, &mut all] {
        let alias = told(program);
        assert_eq!(alias["name"], "alias.under.test");
        assert_eq!(
            (&alias["client"], &alias["server"]),
            (&"10.9.0.1".into(), &"10.9.0.2".into())
        );
        assert_eq!(
            alias["answers"],
            serde_json::json!(["www.under.test", "192.0.2.7"])
        );
        assert_eq!((&alias["type"], &alias["lost"]), (&1.into(), &0.into()));
        let latency = alias["latency_us"].as_u64().unwrap();
        assert!(latency < 10_000_000, "{latency}");
        let six = told(program);
        assert_eq!(
            (&six["type"], &six["answers"]),
            (&28.into(), &serde_json::json!(["2001:db8::7"]))
        );
    }
    assert_eq!(some.next(Some(Duration::from_millis(200))).unwrap(), None);
}

#[test]
fn a_guest_without_the_wire_is_told_of_transactions_as_json() {
    let scene = Scene::new();
    let _server = scene.dnsmasq();
    let uml = AttachedUml::boot(&scene.lab, &scene.daemon, "web", vec![], image().unwrap());
    let uml = uml.unwrap_or_else(|error| panic!("{error}"));
    let _agent = agent(&uml.guest).unwrap();
    let listed = uml
        .guest
        .run("vnplug list; vnplug backends", PATIENCE)
        .unwrap();
    let listed = listed.text();
    assert!(
        listed.contains("dns") && !listed.contains("wire0"),
        "{listed}"
    );
    // By hand, as the example's page has it, and as JSON around its JSON, to look at it.
    let program = uml
        .guest
        .spawn("exec vnplug channel dns --say under.test -c 2 --json 2>&1")
        .unwrap();
    let deadline = Deadline::new("the guest is told");
    while !program.is_done() {
        deadline.check();
        scene.dig(&["aside.test"]);
        scene.dig(&["alias.under.test"]);
    }
    let said = program.wait(PATIENCE).unwrap().text();
    let told: Vec<Value> = values(&said)
        .map(|it| serde_json::from_str(it["message"].as_str().unwrap()).unwrap())
        .collect();
    assert_eq!(told.len(), 2, "{said}");
    for it in told {
        assert_eq!(it["name"], "alias.under.test", "{said}");
        assert_eq!(it["client"], "10.9.0.1");
        assert_eq!(
            it["answers"],
            serde_json::json!(["www.under.test", "192.0.2.7"])
        );
        assert!(it["latency_us"].as_u64().is_some(), "{said}");
    }
}

#[test]
fn lies_of_a_server_harm_nobody() {
    let mut scene = Scene::new();
    let mut program = scene.program("");
    std::thread::sleep(Duration::from_millis(300));
    let near = scene
        .near
        .enter(|| UdpSocket::bind("10.9.0.1:4444").unwrap())
        .unwrap();
    let far = scene
        .far
        .enter(|| UdpSocket::bind("10.9.0.3:53").unwrap())
        .unwrap();
    far.connect("10.9.0.1:4444").unwrap();
    let head = |answers: u8| [0, 7, 0x80, 0, 0, 1, 0, answers, 0, 0, 0, 0];
    let message = |answers: u8, rest: &[u8]| [&head(answers)[..], rest].concat();
    let end = [0, 1, 0, 1];
    let pointers: Vec<u8> = (0..60_u8).flat_map(|at| [0xc0, 12 + at * 2 + 2]).collect();
    let labels = [[63].to_vec(), vec![b'a'; 63]].concat().repeat(5);
    let lies = [
        message(0, &[&[0xc0, 12][..], &end].concat()), // to itself
        message(0, &[&[1, b'a', 0xc0, 12][..], &end].concat()), // to its own beginning
        message(0, &[&[0xff, 0xff][..], &end].concat()), // beyond the end
        message(0, &[&pointers[..], &end].concat()),   // forward, from one to the next
        message(0, &[&labels[..], &[0], &end].concat()), // a name of 320 bytes
        message(0, &[0x40, b'a']),                     // a label of an unknown kind
        message(0, &[63, b'a']),                       // a label beyond the end
        message(255, &[&[1, b'x', 0][..], &end].concat()), // answers that are not there
        message(
            1,
            &[
                &[1, b'y', 0][..],
                &end,
                &[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 255, 255, 1],
            ]
            .concat(),
        ),
        vec![],
        head(0).to_vec(),
    ];
    for lie in &lies {
        far.send(lie).unwrap();
    }
    // The two whose question is whole are told, without the answers that are not.
    for name in ["x", "y"] {
        let answer = told(&mut program);
        assert_eq!(
            (&answer["name"], &answer["latency_us"]),
            (&name.into(), &Value::Null)
        );
        assert_eq!(answer["answers"], serde_json::json!([]));
    }
    // What is said of text stays JSON.
    let quoted = [&[5][..], b"\"\\\n\xffa", &[0], &end].concat();
    far.send(&message(0, &quoted)).unwrap();
    assert_eq!(told(&mut program)["name"], "????a");
    // Any bytes, made of good ones; the same each time.
    let good = [
        &[3][..],
        b"www",
        &[0],
        &end,
        &[0xc0, 12, 0, 5, 0, 1, 0, 0, 0, 9, 0, 4, 1, b'b', 0xc0, 12],
    ];
    let good = message(1, &good.concat());
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for _ in 0..20_000 {
        let mut bytes = good.clone();
        for _ in 0..random() % 6 {
            let at = random() as usize % bytes.len();
            bytes[at] = random() as u8;
        }
        bytes.truncate(1 + random() as usize % bytes.len());
        // Full buffers of a slow machine are no failure.
        let _ = far.send(&bytes);
    }
    // What comes while the program's window is full is not told: said until it is.
    let last = message(0, &[&[4][..], b"last", &[0], &end].concat());
    let deadline = Deadline::new("the last answer is told");
    let mut seen = 0;
    loop {
        deadline.check();
        match program.next(Some(Duration::from_millis(200))).unwrap() {
            Some(Told::Message(bytes)) => {
                seen += 1;
                let answer: Value = serde_json::from_slice(&bytes).unwrap();
                if answer["name"] == "last" {
                    break;
                }
            }
            None => drop(far.send(&last)),
            Some(other) => panic!("{other:?}"),
        }
    }
    assert!(seen > 100, "{seen}");
    assert!(scene.back.0.try_wait().unwrap().is_none(), "it ended");
    // A question that is longer than any name ends the channel, not the back-end.
    program.send(&[b'a'; 256]).unwrap();
    let gone = loop {
        match program.next(SOON).unwrap() {
            Some(Told::Message(_)) => {}
            other => break other,
        }
    };
    assert!(matches!(gone, Some(Told::Gone(_))), "{gone:?}");
    assert!(matches!(program.send(b""), Err(Error::Disconnected)));
    assert_eq!(program.next(SOON).unwrap(), Some(Told::Back));
    drop(near);
}
