//! The pages that users read, and what of a command line stands on none of them.

use std::fs;
use std::path::Path;

/// README and `docs/`.
///
/// ```
/// let pages = vnplug_testing::Pages::of(["`vnplug list --json` lists the devices."]);
/// assert!(pages.lack("vnplug list", ["json"]).is_empty());
/// assert_eq!(pages.lack("vnplug list", ["all"]), ["vnplug list --all"]);
/// assert_eq!(pages.lack("vnplug top", []), ["vnplug top"]);
/// ```
#[derive(Debug)]
pub struct Pages(Vec<String>);

impl Pages {
    /// Reads all of them.
    ///
    /// # Panics
    /// If one cannot be read.
    pub fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut texts = vec![text(&root.join("README.md"))];
        below(&root.join("docs"), &mut texts);
        Self(texts)
    }

    /// Pages with these texts.
    pub fn of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        Self(texts.into_iter().map(str::to_owned).collect())
    }

    /// The options of a command, given by their long names, that stand on no page on which the command stands;
    /// the command itself, if there is no such page.
    pub fn lack<'a>(
        &self,
        command: &str,
        options: impl IntoIterator<Item = &'a str>,
    ) -> Vec<String> {
        let pages: Vec<&String> = self.0.iter().filter(|it| stands(it, command)).collect();
        if pages.is_empty() {
            return vec![command.to_owned()];
        }
        let options = options.into_iter().map(|name| format!("--{name}"));
        let lacking = options.filter(|option| !pages.iter().any(|page| stands(page, option)));
        lacking
            .map(|option| format!("{command} {option}"))
            .collect()
    }
}

/// Whether these words are in a text, and not as part of longer ones.
fn stands(text: &str, words: &str) -> bool {
    let goes_on = |next: Option<char>| next.is_some_and(|it| it == '-' || it.is_alphanumeric());
    text.match_indices(words).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + words.len()..]);
        !goes_on(before.chars().next_back()) && !goes_on(after.chars().next())
    })
}

fn below(dir: &Path, texts: &mut Vec<String>) {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    for entry in entries {
        let entry = entry.unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        let path = entry.path();
        match path.is_dir() {
            true => below(&path, texts),
            false if path.extension().is_some_and(|it| it == "md") => texts.push(text(&path)),
            false => {}
        }
    }
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_are_part_of_longer_ones_do_not_stand_there() {
        let text = "`vnplug list --json-lines` and vnplug-web --tls-key=FILE";
        for words in ["vnplug list", "vnplug-web", "--json-lines", "--tls-key"] {
            assert!(stands(text, words), "{words}");
        }
        for words in ["--json", "vnplug web", "--tls", "vnplug", "-key"] {
            assert_eq!(stands(text, words), words == "vnplug", "{words}");
        }
    }

    #[test]
    fn an_option_counts_where_its_command_stands() {
        let pages = Pages::of(["vnplug top --json", "vnplug list"]);
        assert_eq!(pages.lack("vnplug list", ["json"]), ["vnplug list --json"]);
        assert!(pages.lack("vnplug top", ["json"]).is_empty());
    }

    #[test]
    fn all_pages_are_read() {
        let pages = Pages::read();
        assert!(pages.0.len() > 40, "{}", pages.0.len());
        assert!(pages.lack("vnplug extract", ["from"]).is_empty());
    }
}
