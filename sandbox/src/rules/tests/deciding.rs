//! What several rules and files say together.

use super::*;

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
