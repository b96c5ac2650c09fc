//! Which files of rules a sandbox has.
//!
//! | file | who writes it | in which order |
//! |---|---|---|
//! | `all.toml` | people | first: rules for every profile |
//! | `NAME.toml` | people | second: the profile `NAME`; without `--profile` it is `default` |
//! | built in | we | third, if there is such a profile: `agent`, `build`; last of all `base` |
//! | `answers/NAME.toml` | answers that hold always | looked at where the rules say *ask* |
//! | `.vnplug-sandbox.toml` | the project, in the directory or above it | can only tighten |
//!
//! The first four are in `$XDG_CONFIG_HOME/vnplug/sandbox` (`~/.config/…`). `--profile FILE`, with a slash or `.toml`
//! in it, takes that file instead of the second; its answers have a name made of its path.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::rules::file::{self, parse};
use crate::rules::policy::TIMEOUT;
use crate::rules::{BadFile, Origin, Policy, Say, Sheet};

/// Where the rules of a sandbox stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The name, as answers and notes have it.
    pub name: String,
    /// Rules for every profile.
    pub all: PathBuf,
    /// The profile's own rules.
    pub own: PathBuf,
    /// Answers that hold always.
    pub answers: PathBuf,
    /// The file of the project.
    pub project: Option<PathBuf>,
}

impl Profile {
    /// The profile with this name, or in this file; `directory` has the user's files, `project` is where a project's
    /// file is looked for, and above it.
    ///
    /// # Errors
    /// There is no such profile; the text says which there are.
    pub fn find(
        profile: Option<&str>,
        directory: &Path,
        project: Option<&Path>,
    ) -> Result<Self, String> {
        let project = project.and_then(|from| {
            from.ancestors()
                .map(|dir| dir.join(PROJECT))
                .find(|file| file.exists())
        });
        let all = directory.join("all.toml");
        let name = profile.unwrap_or(DEFAULT);
        if name.contains('/') || name.ends_with(".toml") {
            let own = std::fs::canonicalize(name).map_err(|error| format!("{name}: {error}"))?;
            let mut hasher = DefaultHasher::new();
            own.hash(&mut hasher);
            let stem = own
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let answers = directory.join(format!("answers/{stem}-{:016x}.toml", hasher.finish()));
            return Ok(Self {
                name: own.display().to_string(),
                all,
                own,
                answers,
                project,
            });
        }
        let own = directory.join(format!("{name}.toml"));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if !name.chars().all(plain) || name.is_empty() || name == "all" {
            return Err(format!(
                "{name:?} is no name of a profile: write letters, digits, - and _, and not `all`"
            ));
        }
        if name != DEFAULT && builtin(name).is_none() && !own.exists() {
            let why = format!(
                "there is no profile {name:?}: write it to {}, or take agent or build",
                own.display()
            );
            return Err(why);
        }
        let answers = directory.join(format!("answers/{name}.toml"));
        Ok(Self {
            name: name.to_owned(),
            all,
            own,
            answers,
            project,
        })
    }

    /// The rules.
    ///
    /// # Errors
    /// [`BadFile`] of the first file that has errors. None is left out: what it refuses would be allowed.
    pub fn load(&self) -> Result<Policy, BadFile> {
        let (all, own) = (file::read(&self.all)?, file::read(&self.own)?);
        let theirs = builtin(&self.name).unwrap_or_default();
        let base = sheet("base", BASE);
        let default = own
            .default
            .or(theirs.default)
            .or(all.default)
            .unwrap_or(Say::Ask);
        let timeout = own
            .timeout
            .or(theirs.timeout)
            .or(all.timeout)
            .unwrap_or(TIMEOUT);
        let sheets = [all, own, theirs, base];
        Ok(Policy {
            rules: sheets.into_iter().flat_map(|sheet| sheet.rules).collect(),
            default,
            project: self.project.as_deref().map(file::read).transpose()?,
            answers: file::read(&self.answers)?.rules,
            timeout,
            own_loopback: false,
        })
    }
}

/// Where the user's files are: `$XDG_CONFIG_HOME/vnplug/sandbox`, or `~/.config/…`; `None` if neither is known.
pub fn directory() -> Option<PathBuf> {
    let absolute = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let config = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")));
    Some(config?.join("vnplug/sandbox"))
}

/// A profile that is part of this program.
fn builtin(name: &str) -> Option<Sheet> {
    let (name, text) = BUILTIN.iter().find(|(known, _)| *known == name)?;
    Some(sheet(name, text))
}

fn sheet(name: &'static str, text: &str) -> Sheet {
    // A line of a file that nobody has says nothing: rules are counted.
    parse(text, |_, number| Origin::Builtin(name, number)).unwrap_or_else(|error| {
        log::error!("{error}");
        // Tests read all of them. If one had an error, it would refuse everything.
        Sheet {
            default: Some(Say::Deny),
            timeout: None,
            rules: vec![Arc::new(crate::rules::Rule::new(Say::Deny))],
        }
    })
}

/// The name of the profile without `--profile`.
pub const DEFAULT: &str = "default";
/// The file of a project.
pub const PROJECT: &str = ".vnplug-sandbox.toml";
const BASE: &str = include_str!("profiles/base.toml");
const BUILTIN: [(&str, &str); 2] = [
    ("agent", include_str!("profiles/agent.toml")),
    ("build", include_str!("profiles/build.toml")),
];

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_testing::TestDir;

    #[test]
    fn what_is_built_in_can_be_read() {
        for (name, text) in BUILTIN.iter().chain(&[("base", BASE)]) {
            let sheet = parse(text, |line, number| Origin::Builtin("x", line + number))
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(!sheet.rules.is_empty());
        }
    }

    #[test]
    fn a_profile_is_several_files_in_their_order() {
        let dir = TestDir::new("sandbox-profile");
        let write = |name: &str, text: &str| {
            let path = dir.path(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "c/all.toml",
            "default = 'allow'\n[[rule]]\nsay = 'deny'\nto = 'a.org'\n",
        );
        write(
            "c/agent.toml",
            "timeout = '5s'\n[[rule]]\nsay = 'allow'\nto = 'b.org'\n",
        );
        write(
            "c/answers/agent.toml",
            "[[rule]]\nsay = 'allow'\nto = 'c.org'\n",
        );
        write("p/.vnplug-sandbox.toml", "default = 'deny'\n");
        std::fs::create_dir_all(dir.path("p/src/deep")).unwrap();
        let profile =
            Profile::find(Some("agent"), &dir.path("c"), Some(&dir.path("p/src/deep"))).unwrap();
        assert_eq!(profile.project, Some(dir.path("p/.vnplug-sandbox.toml")));
        let policy = profile.load().unwrap();
        let origins: Vec<String> = policy
            .rules
            .iter()
            .map(|rule| rule.origin.to_string())
            .collect();
        assert!(
            origins[0].ends_with("/c/all.toml:2") && origins[1].ends_with("/c/agent.toml:2"),
            "{origins:?}"
        );
        assert_eq!(
            &origins[2..5],
            [
                "profile agent, rule 1",
                "profile agent, rule 2",
                "profile base, rule 1"
            ]
        );
        // The profile's default before that of all.
        assert_eq!(
            (
                policy.default,
                policy.timeout.as_secs(),
                policy.answers.len()
            ),
            (Say::Ask, 5, 1)
        );
        assert_eq!(policy.project.unwrap().default, Some(Say::Deny));
        // Without a profile there is no file to be had, and rules for all.
        let policy = Profile::find(None, &dir.path("c"), None)
            .unwrap()
            .load()
            .unwrap();
        assert_eq!((policy.default, policy.project), (Say::Allow, None));
        let own = dir.path("c/agent.toml");
        let by_file = Profile::find(own.to_str(), &dir.path("c"), None).unwrap();
        assert_eq!(by_file.load().unwrap().answers.len(), 0);
        for name in ["all", "", "x", "../x", "a b"] {
            assert!(
                Profile::find(Some(name), &dir.path("c"), None).is_err(),
                "{name}"
            );
        }
        write("c/all.toml", "default = 'perhaps'\n");
        assert!(profile.load().is_err());
    }
}
