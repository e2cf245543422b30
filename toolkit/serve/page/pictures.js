// Pictures that a question is about, as data URLs: small enough for this browser to keep them with the conversation.

import { make } from "./markdown.js";

const LONGEST = 1280; // pixels of a side

/** A file as a data URL. Throws where it is no picture that the browser reads. */
export async function readPicture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name}: this browser cannot read it as an image`);
  }
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = make("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent, as the server has it
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

/** Elements that show pictures; with `remove` each is a button that calls it with the picture's number. */
export function pictureElements(urls, remove = null) {
  return urls.map((src, i) => {
    const image = make("img", { src, alt: `Image ${i + 1}` });
    if (!remove) return image;
    const made = make("button", { type: "button", className: "quiet", ariaLabel: `Remove image ${i + 1}` }, image);
    made.addEventListener("click", () => remove(i));
    return made;
  });
}

/** What a message says, as OpenAI's API has it. */
export function parts({ content, images }) {
  if (!images?.length) return content;
  const shown = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...shown, { type: "text", text: content }] : shown;
}
